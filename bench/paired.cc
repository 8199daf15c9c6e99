#include "bench/paired.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace layerd::bench {
namespace {

Paired MeasureOnce(const PairOptions& options, absl::FunctionRef<double()> ours, absl::FunctionRef<double()> other) {
  const std::chrono::duration<double> pause(options.pause_seconds);
  std::vector<double> mine, others, ratios;
  for (int pair = 0; pair < std::max(5, options.pairs); ++pair) {
    std::this_thread::sleep_for(pause);
    mine.push_back(ours());
    std::this_thread::sleep_for(pause);
    others.push_back(other());
    ratios.push_back(mine.back() / others.back());
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  return {Median(mine), Median(others), Median(ratios), *most / *least, 1};
}

}  // namespace

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Sampler::Sampler(std::function<void()> work, double sample_seconds) : work_(std::move(work)) {
  (*this)();
  double seconds = (*this)();
  while (seconds * static_cast<double>(calls_) < sample_seconds / 2) {
    calls_ *= 2;
    seconds = (*this)();
  }
}

double Sampler::operator()() const {
  if (calls_ > 1) work_();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t call = 0; call < calls_; ++call) work_();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / static_cast<double>(calls_);
}

Paired MeasurePairs(const PairOptions& options, absl::FunctionRef<double()> ours, absl::FunctionRef<double()> other) {
  Paired best = MeasureOnce(options, ours, other);
  for (int attempt = 2; attempt <= options.attempts && best.spread > options.max_spread; ++attempt) {
    const Paired again = MeasureOnce(options, ours, other);
    if (again.spread < best.spread) best = again;
    best.attempts = attempt;
  }
  return best;
}

}  // namespace layerd::bench
