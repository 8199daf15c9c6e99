// What a program of benchmarks does: options, and running the cells that were chosen.
#ifndef LAYERD_BENCH_RUN_CELLS_H_
#define LAYERD_BENCH_RUN_CELLS_H_

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/cell.h"
#include "bench/paired.h"
#include "bench/results.h"

namespace layerd::bench {

struct RunOptions {
  std::string filter;
  std::string json;
  PairOptions pairs;
  bool list = false;
};

// --filter, --json, --pairs, --sample_ms and --list. `options` must outlive the parsing; call RunCells() after it.
void AddRunOptions(CLI::App& app, RunOptions& options);

// Only the cells that --filter chooses. Throws std::regex_error where it is no regular expression.
std::vector<Cell> Chosen(const RunOptions& options, std::vector<Cell> cells);

// Measures the cells one after the other and prints a line of each; writes --json. Answers the exit status of a program:
// 0, or 1 where a cell computed wrongly or the file could not be written, or 2 where there are no cells. With --list it
// only prints the names.
int RunCells(const RunOptions& options, const std::vector<Cell>& cells, Description machine);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_RUN_CELLS_H_
