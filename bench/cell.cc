#include "bench/cell.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "bench/threads.h"

namespace layerd::bench {
namespace {

constexpr double kLongestLimitSample = 0.25;  // seconds

}  // namespace

std::string CellName::Text() const {
  std::string text = kernel;
  if (!variant.empty()) absl::StrAppend(&text, "/", variant);
  absl::StrAppend(&text, "/", dtype, "/");
  if (hidden_dim > 0) {
    absl::StrAppend(&text, dim, "x", hidden_dim);
    if (rows > 0) absl::StrAppend(&text, "/M", rows);
  } else {
    absl::StrAppend(&text, rows, "x", dim);
  }
  return absl::StrCat(text, "/t", threads);
}

Bench::Setup& Bench::SetupOf(int threads) {
  std::unique_ptr<Setup>& setup = setups_[threads];
  if (setup == nullptr) setup = std::make_unique<Setup>(threads);
  return *setup;
}

Result Bench::Measure(const Cell& cell) {
  UnpinThread();
  Setup& setup = SetupOf(cell.name.threads);
  const Work work = cell.prepare(setup.arena);
  OnAllThreads(setup.arena, [](int part) {});
  work.run();
  if (work.baseline) work.baseline();
  // Now all threads exist: the arena's, and those of the libraries that it is compared with.
  if (cell.pinned) PinThreads();

  Result result{.name = cell.name, .goal = cell.goal, .flops = work.flops, .bytes = work.bytes};
  Sampler ours(work.run, options_.sample_seconds);
  // A long computation is compared with more than a moment of its limit.
  setup.limits.SetSampleSeconds(std::max(options_.sample_seconds, std::min(ours() / 4, kLongestLimitSample)));
  if (cell.bound == Bound::kBaseline) {
    result.bound = cell.baseline;
    if (work.baseline_sample) {
      result.paired = MeasurePairs(options_, ours, work.baseline_sample);
    } else {
      result.paired = MeasurePairs(options_, ours, Sampler(work.baseline, options_.sample_seconds));
    }
    if (work.baseline_error) result.other_error = work.baseline_error();
  } else if (cell.bound == Bound::kCopy) {
    setup.limits.Copy(work.bytes);
    result.bound = setup.limits.copy_way();
    result.paired = MeasurePairs(options_, ours, [&] { return setup.limits.Copy(work.bytes); });
  } else {
    // Which of the two binds is seen in every pair; told is which it was mostly.
    int read_bound = 0;
    const auto limit = [&] {
      const double read = setup.limits.Read(work.bytes), multiply = setup.limits.Multiply(work.flops);
      read_bound += read >= multiply ? 1 : -1;
      return std::max(read, multiply);
    };
    limit();
    result.paired = MeasurePairs(options_, ours, limit);
    result.bound = read_bound > 0 ? "read" : "multiply";
  }
  work.run();
  result.error = work.error();
  result.wrong = !(result.error <= work.max_error);
  return result;
}

std::vector<Cell> AllCells(int max_threads) {
  std::vector<int> threads = {1, 2, max_threads};
  threads.erase(std::remove_if(threads.begin(), threads.end(), [&](int n) { return n > max_threads; }), threads.end());
  threads.erase(std::unique(threads.begin(), threads.end()), threads.end());
  std::vector<Cell> cells;
  AddFeedForwardCells(threads, cells);
  AddProductCells(threads, cells);
  AddNormCells(threads, cells);
  AddElementCells(threads, cells);
  AddPackingCells(threads, cells);
  return cells;
}

double RelativeError(const std::vector<float>& got, const std::vector<double>& want) {
  double largest = 0, squares = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = std::fabs(got[i] - want[i]);
    if (!(difference <= largest)) largest = difference;
    squares += want[i] * want[i];
  }
  return largest / std::sqrt(squares / static_cast<double>(want.size()));
}

double BitError(bool same) { return same ? 0.0 : std::numeric_limits<double>::quiet_NaN(); }

}  // namespace layerd::bench
