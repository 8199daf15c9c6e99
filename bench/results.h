// Results as JSON and as lines of a table.
#ifndef LAYERD_BENCH_RESULTS_H_
#define LAYERD_BENCH_RESULTS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "bench/cell.h"

namespace layerd::bench {

// What a figure means nothing without, in the order to print.
using Description = std::vector<std::pair<std::string, std::string>>;

// Processor, caches, compiler, and so on. Call it before threads are pinned.
Description DescribeMachine();

// Where `bytes` fit, by the sizes that the system tells: "L1" or "L2" (of `threads` cores together), "L3", "memory".
std::string FitsIn(double bytes, int threads);

// "# processor: …", one line each.
std::string Comments(const Description& machine);
// The head of the table, and the line of one result.
std::string TableHead();
std::string TableLine(const Result& result);

// Writes {"machine": {…}, "cells": [{"name", "ratio", "goal", …}, …]} to `path`; docs/performance.md explains the fields.
// INTERNAL where the file cannot be written.
absl::Status WriteJson(const std::string& path, const Description& machine, const std::vector<Result>& results);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_RESULTS_H_
