// Measures every kernel and layer beside what limits it. docs/performance.md tells how to run and read it.
//
// Google Benchmark holds and runs the cells; the time of a cell is measured by bench/paired.h, since what counts is the
// ratio of two things measured in turn.
#include <cstdio>
#include <exception>
#include <string>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "bench/cell.h"
#include "bench/run_cells.h"
#include "lib/base/parallel.h"
#include "lib/kernels/matmul.h"
#include "lib/kernels/simd.h"

namespace layerd::bench {
namespace {

struct Options {
  RunOptions run;
  std::string simd;
  int threads = AvailableCpus();
  bool no_openblas = false;
};

// What InitMatMul() found, as part of the machine's description.
std::pair<std::string, std::string> DescribeOpenBlas(const MatMulReport& report) {
  if (report.openblas_version.empty()) return {"OpenBLAS", absl::StrCat("not loaded: ", report.reason)};
  return {"OpenBLAS", absl::StrCat(report.openblas_version, ", core ", report.openblas_core,
                                   report.used ? ", used" : absl::StrCat(", not used: ", report.reason))};
}

int Main(const Options& options) {
  if (!options.simd.empty()) {
    const auto simd = ParseSimd(options.simd);
    if (!simd || !SetSimd(*simd)) {
      std::fprintf(stderr, "kernel_bench: this CPU cannot run --simd '%s'\n", options.simd.c_str());
      return 2;
    }
  }
  const auto matmul = InitMatMul(!options.no_openblas);
  if (!matmul.ok()) {
    std::fprintf(stderr, "kernel_bench: %s\n", matmul.status().ToString().c_str());
    return 1;
  }
  Description machine = DescribeMachine();
  machine.push_back(DescribeOpenBlas(*matmul));
  return RunCells(options.run, Chosen(options.run, AllCells(options.threads)), std::move(machine));
}

}  // namespace
}  // namespace layerd::bench

int main(int argc, char** argv) {
  layerd::bench::Options options;
  CLI::App app("Measures kernels and layers beside what limits them.");
  layerd::bench::AddRunOptions(app, options.run);
  app.add_option("--threads", options.threads, "The most threads; cells run on 1, 2 and so many")
      ->check(CLI::Range(1, layerd::AvailableCpus()))
      ->capture_default_str();
  app.add_option("--simd", options.simd, "scalar, avx2 or avx512; the widest by default. Of the limits too");
  app.add_flag("--no_openblas", options.no_openblas, "Our own products everywhere");
  CLI11_PARSE(app, argc, argv);
  try {
    return layerd::bench::Main(options);
  } catch (const std::exception& error) {  // a filter that is no regular expression; no memory for a cell
    std::fprintf(stderr, "kernel_bench: %s\n", error.what());
    return 2;
  }
}
