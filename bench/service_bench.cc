// Measures calls of a layerd, over loopback and unix sockets, beside echoes of the same bytes. docs/performance.md tells how
// to run and read it.
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "bench/cell.h"
#include "bench/child_process.h"
#include "bench/fail.h"
#include "bench/results.h"
#include "bench/run_cells.h"
#include "bench/service_cells.h"
#include "bench/services.h"
#include "lib/base/parallel.h"
#include "lib/kernels/matmul.h"

namespace layerd::bench {
namespace {

struct Options {
  RunOptions run;
  std::string daemon = ProgramBeside("layerd");
  int threads = AvailableCpus();
  double overload_s = 0;
};

// What cells are measured with.
void Start(Services& services, const Options& options) {
  services.Start(options.daemon, options.threads);
  if (const auto matmul = InitMatMul(true); !matmul.ok()) Fail(matmul.status());
}

int Main(const Options& options) {
  static Services services;  // static, so that exit() ends them too
  if (options.overload_s > 0) {
    Start(services, options);
    return RunOverload(services, options.threads, absl::Seconds(options.overload_s));
  }
  std::vector<Cell> cells;
  AddServiceNormCells(services, options.threads, cells);
  AddServiceStreamCells(services, options.threads, cells);
  AddServiceFeedForwardCells(services, options.threads, cells);
  AddServiceOverloadCell(services, options.threads, cells);
  cells = Chosen(options.run, std::move(cells));
  if (!options.run.list && !cells.empty()) Start(services, options);
  return RunCells(options.run, cells, DescribeMachine());
}

}  // namespace
}  // namespace layerd::bench

int main(int argc, char** argv) {
  // As in layerd: Debian's Abseil looks for deadlocks at every lock otherwise.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  layerd::bench::Options options;
  CLI::App app("Measures calls of a layerd beside echoes of the same bytes.");
  layerd::bench::AddRunOptions(app, options.run);
  app.add_option("--daemon", options.daemon, "The layerd to start")->check(CLI::ExistingFile)->capture_default_str();
  app.add_option("--threads", options.threads, "Computing threads of the daemon")
      ->check(CLI::Range(1, layerd::AvailableCpus()))
      ->capture_default_str();
  app.add_option("--overload_s", options.overload_s,
                 "Instead of cells: ten times as many calls as can be served for so many seconds in one piece")
      ->check(CLI::Range(1.0, 3600.0));
  CLI11_PARSE(app, argc, argv);
  try {
    return layerd::bench::Main(options);
  } catch (const std::exception& error) {  // a filter that is no regular expression; no memory for a cell
    std::fprintf(stderr, "service_bench: %s\n", error.what());
    return 2;
  }
}
