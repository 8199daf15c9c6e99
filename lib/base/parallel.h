// Divides work over one arena of threads. oneTBB underneath, or plain std::thread where LAYERD_STD_THREADS is set.
//
// All parallel work of a process goes through one Arena, sized to the CPUs it may use, so that nothing oversubscribes
// them. The division of the work never changes a result: every output element is computed whole by one thread.
#ifndef LAYERD_LIB_BASE_PARALLEL_H_
#define LAYERD_LIB_BASE_PARALLEL_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace layerd {

// CPUs that this process may run on: the affinity mask, further limited by the cgroup's CPU quota (rounded up).
int AvailableCpus();

// Threads: For() may be called from any number of threads at once, and from inside a For().
class Arena {
 public:
  // At most `threads` threads (at least 1), the caller of For() among them, run at once.
  explicit Arena(int threads);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end) on ranges that together cover [0, n) exactly once, each of at least `grain` elements (the
  // last may be smaller), and returns when all are done. n up to `grain` runs on the calling thread without a wake-up.
  void For(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t begin, int64_t end)> body) const;

 private:
  struct Impl;
  int threads_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_PARALLEL_H_
