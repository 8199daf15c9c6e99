// Times two things in turn (A B A B …), so that what disturbs the machine meanwhile disturbs both.
//
// Threads: one at a time.
#ifndef LAYERD_BENCH_PAIRED_H_
#define LAYERD_BENCH_PAIRED_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/functional/function_ref.h"

namespace layerd::bench {

// The middle value; of an even number of values the mean of the two in the middle. Not for none.
double Median(std::vector<double> values);

// One call of `work` after another, as many as fill about `sample_seconds`; answers the mean seconds of a call. Where that
// is more than one, one more comes first and does not count: it finds the caches as something else left them.
class Sampler {
 public:
  // Calls `work` some times, to warm up and to find how many calls fill a sample.
  Sampler(std::function<void()> work, double sample_seconds);
  double operator()() const;

 private:
  std::function<void()> work_;
  int64_t calls_ = 1;
};

struct PairOptions {
  int pairs = 7;                 // at least 5
  double sample_seconds = 0.01;  // of one side, or one call where that takes longer
  double pause_seconds = 0;      // before each sample: threads of the other side that wait by spinning give up
  double max_spread = 1.3;       // over this it is all measured again …
  int attempts = 4;              // … until it was measured so often
};

struct Paired {
  double seconds;        // of ours, the median
  double other_seconds;  // of the other, the median
  double ratio;          // the median of the pairs' ratios, ours over the other
  double spread;         // the pairs' largest ratio over their smallest
  int attempts;          // made; the one with the least spread is the one told
};

// Both answer seconds of the same work; `ours` goes first.
Paired MeasurePairs(const PairOptions& options, absl::FunctionRef<double()> ours, absl::FunctionRef<double()> other);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_PAIRED_H_
