#include "bench/run_cells.h"

#include <benchmark/benchmark.h>

#include <cstdio>
#include <regex>
#include <utility>

#include "absl/strings/str_cat.h"

namespace layerd::bench {
namespace {

// Lines are printed by the cells as they are done: the library's own table has no use here.
class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {}
};

void Run(const Cell& cell, Bench& bench, std::vector<Result>& results, benchmark::State& state) {
  for (auto _ : state) {
    results.push_back(bench.Measure(cell));
    state.SetIterationTime(results.back().paired.seconds);
  }
  std::fputs(TableLine(results.back()).c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace

void AddRunOptions(CLI::App& app, RunOptions& options) {
  app.add_option("--filter", options.filter, "Only cells whose name has a match of this regular expression");
  app.add_option("--json", options.json, "Write the results to this file too, for bench/report");
  app.add_option("--pairs", options.pairs.pairs, "Pairs of samples a cell")
      ->check(CLI::Range(5, 1000))
      ->capture_default_str();
  app.add_option_function<double>(
         "--sample_ms", [&options](double ms) { options.pairs.sample_seconds = ms / 1e3; },
         "Length of a sample, unless one call takes longer")
      ->check(CLI::Range(0.1, 10000.0))
      ->default_str(absl::StrCat(options.pairs.sample_seconds * 1e3));
  app.add_flag("--list", options.list, "Print the names of the cells, run none");
}

std::vector<Cell> Chosen(const RunOptions& options, std::vector<Cell> cells) {
  const std::regex filter(options.filter);
  std::vector<Cell> chosen;
  for (Cell& cell : cells) {
    if (std::regex_search(cell.name.Text(), filter)) chosen.push_back(std::move(cell));
  }
  return chosen;
}

int RunCells(const RunOptions& options, const std::vector<Cell>& cells, Description machine) {
  if (options.list) {
    for (const Cell& cell : cells) std::puts(cell.name.Text().c_str());
    return 0;
  }
  if (cells.empty()) {
    std::fprintf(stderr, "no cell has a name that matches '%s'; see --list\n", options.filter.c_str());
    return 2;
  }
  machine.emplace_back("measured",
                       absl::StrCat(options.pairs.pairs, " pairs, samples of ", options.pairs.sample_seconds * 1e3,
                                    " ms, pauses of ", options.pairs.pause_seconds * 1e3, " ms"));
  std::printf("%s%s", Comments(machine).c_str(), TableHead().c_str());
  std::fflush(stdout);

  Bench bench(options.pairs);
  std::vector<Result> results;
  for (const Cell& cell : cells) {
    benchmark::RegisterBenchmark(cell.name.Text().c_str(),
                                 [&](benchmark::State& state) { Run(cell, bench, results, state); })
        ->Iterations(1)
        ->UseManualTime();
  }
  SilentReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter, "all");
  benchmark::ClearRegisteredBenchmarks();

  if (!options.json.empty()) {
    if (const auto status = WriteJson(options.json, machine, results); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      return 1;
    }
  }
  for (const Result& result : results) {
    if (result.wrong) {
      std::fprintf(stderr, "%s computes wrongly\n", result.name.Text().c_str());
      return 1;
    }
  }
  return 0;
}

}  // namespace layerd::bench
