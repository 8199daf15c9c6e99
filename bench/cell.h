// A cell is one thing that is measured: a kernel or a layer at one size, on so many threads, against what limits it.
//
// Threads: one at a time.
#ifndef LAYERD_BENCH_CELL_H_
#define LAYERD_BENCH_CELL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/limits.h"
#include "bench/paired.h"
#include "lib/base/parallel.h"

namespace layerd::bench {

// What is measured, as parts of its name and as fields for bench/report.
struct CellName {
  std::string kernel;   // "feed_forward", "rms_norm", …
  std::string variant;  // "packed", "inline", …; may be empty
  std::string dtype;    // of the weights, or of what is normalised
  int64_t dim = 0;
  int64_t hidden_dim = 0;  // 0: none
  int64_t rows = 0;        // 0: none
  int threads = 1;

  // "feed_forward/packed/float32/4096x11008/M16/t2", "rms_norm/kernel/float32/16384x4096/t1".
  std::string Text() const;
};

// A cell made ready. What it holds must outlive its calls.
struct Work {
  std::function<void()> run;
  double flops = 0;               // 2 for each multiply-add of the products; 0: not counted
  double bytes = 0;               // that must be read, or read and written, at least
  std::function<double()> error;  // of what the last run() computed: max|y − ref| / rms(ref) against float64
  double max_error = 1e-5;        // more than this, or NaN: the computation is wrong
  // What it is compared with, where the bound is kBaseline: a call, or where that is another process's, a sample that
  // answers the mean seconds of a call; and its own error, where it has one.
  std::function<void()> baseline;
  std::function<double()> baseline_sample;
  std::function<double()> baseline_error;
};

enum class Bound : uint8_t {
  kProduct,   // the larger of reading `bytes` and multiplying `flops`
  kCopy,      // copying: `bytes` are read and written
  kBaseline,  // not a limit of the machine: another computation
};

struct Cell {
  CellName name;
  Bound bound = Bound::kProduct;
  std::string baseline;        // its name, where the bound is kBaseline
  std::optional<double> goal;  // the ratio to reach: at most this
  bool pinned = true;          // its threads are bound to CPUs; not where they wait for one another all the time
  std::function<Work(const Arena&)> prepare;
};

struct Result {
  CellName name;
  std::optional<double> goal;
  Paired paired;
  std::string bound;  // "read", "multiply", "copy", "non-temporal copy", or the name of a baseline or a peer
  double flops = 0;
  double bytes = 0;
  double error = 0;
  std::optional<double> other_error;  // of a peer
  bool wrong = false;                 // the error is more than the cell allows
};

// What cells are measured with: an arena and its limits for each number of threads.
class Bench {
 public:
  explicit Bench(const PairOptions& options) : options_(options) {}

  const PairOptions& options() const { return options_; }
  const Arena& ArenaOf(int threads) { return SetupOf(threads).arena; }
  Result Measure(const Cell& cell);

 private:
  struct Setup {
    explicit Setup(int threads) : arena(threads), limits(arena) {}
    const Arena arena;
    Limits limits;
  };

  Setup& SetupOf(int threads);

  const PairOptions options_;
  std::map<int, std::unique_ptr<Setup>> setups_;
};

// All cells of kernel_bench on up to `max_threads` threads (1, 2, and so many), each family in a file of its own. Cells
// that share large data are neighbours.
std::vector<Cell> AllCells(int max_threads);
void AddFeedForwardCells(const std::vector<int>& threads, std::vector<Cell>& cells);
void AddProductCells(const std::vector<int>& threads, std::vector<Cell>& cells);
void AddNormCells(const std::vector<int>& threads, std::vector<Cell>& cells);
void AddElementCells(const std::vector<int>& threads, std::vector<Cell>& cells);
void AddPackingCells(const std::vector<int>& threads, std::vector<Cell>& cells);

// max|got − want| / rms(want); NaN where a value is NaN.
double RelativeError(const std::vector<float>& got, const std::vector<double>& want);
// The error of what must be the same to the bit: 0 where it is, NaN where not.
double BitError(bool same);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_CELL_H_
