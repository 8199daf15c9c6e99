// How fast this machine can read, copy and multiply at most, measured beside the work that is compared with it.
//
// Each is measured on the arena's threads, on a share of the data each, over and over for as long as a sample lasts. The
// buffers have the size that the work has, since what fits a cache is read faster; of several ways (one stream or four,
// through the caches or past them) the one that is fastest at that size counts.
//
// Threads: one at a time.
#ifndef LAYERD_BENCH_LIMITS_H_
#define LAYERD_BENCH_LIMITS_H_

#include <cstdint>
#include <map>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "lib/base/parallel.h"
#include "lib/base/tensor.h"

namespace layerd::bench {

class Limits {
 public:
  explicit Limits(const Arena& arena) : arena_(arena) {}

  // About how long each of the following takes, where the data is not so large that one turn takes longer.
  void SetSampleSeconds(double seconds) { sample_seconds_ = seconds; }

  // Seconds for reading `bytes` once.
  double Read(double bytes);
  // Seconds for copying, `bytes` read and written together.
  double Copy(double bytes);
  // Seconds for `flops` float32 operations, 2 for each fused multiply-add.
  double Multiply(double flops);

  // How the last Copy() was done: "copy" or "non-temporal copy".
  std::string_view copy_way() const { return copies_non_temporally_ ? "non-temporal copy" : "copy"; }

 private:
  // The fastest way to do something, and the seconds that one turn takes.
  struct Plan {
    int way = 0;
    double seconds = 0;
  };

  // Seconds of one turn of body(part, way), after the best plan was found; `plans` remembers it for `size`.
  double Measure(std::map<int64_t, Plan>& plans, int64_t size, int ways,
                 absl::FunctionRef<void(int part, int way)> body);

  const Arena& arena_;
  double sample_seconds_ = 0.01;
  bool copies_non_temporally_ = false;
  std::map<int64_t, Plan> read_plans_, copy_plans_, multiply_plans_;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_LIMITS_H_
