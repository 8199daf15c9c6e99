// The engine that computes, on this machine's CPUs.
#ifndef LAYERD_LIB_ENGINE_CPU_ENGINE_H_
#define LAYERD_LIB_ENGINE_CPU_ENGINE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "lib/base/parallel.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

struct CpuEngineOptions {
  int threads = 1;                               // computing threads; at least 1
  int queue_calls = 256;                         // calls that may wait; more are refused
  int64_t max_answer_bytes = int64_t{64} << 20;  // a larger answer is refused before anything is computed
  double max_verify_flops = 4e9;                 // a larger layer is not verified
};

// Calls wait in one queue, in order of arrival, for `threads` workers; each may divide its work over the arena, which
// holds as many threads. Before a call's work begins its deadline and cancellation are looked at, and its shapes are
// checked when it arrives, on the caller's thread.
//
// A full queue is RESOURCE_EXHAUSTED with a delay measured from how fast the queue drains. Memory that cannot be had is
// RESOURCE_EXHAUSTED too. The destructor finishes what was accepted.
class CpuEngine : public LayerEngine {
 public:
  explicit CpuEngine(const CpuEngineOptions& options);
  ~CpuEngine() override;

  void Normalize(NormalizeCall call, NormalizeDone done) override;
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override;

  // Worker threads that could be started: options.threads, or fewer where the system refused some.
  int workers() const { return static_cast<int>(workers_.size()); }

 private:
  using Job = absl::AnyInvocable<void()>;

  // Queues `job`, or returns why it cannot be.
  absl::Status Enqueue(Job job);
  void Work();

  absl::StatusOr<NormalizeResult> Compute(const NormalizeCall& call) const;
  absl::StatusOr<FeedForwardResult> Compute(const FeedForwardCall& call) const;

  const CpuEngineOptions options_;
  const Arena arena_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;          // guarded by mutex_
  double mean_job_seconds_ = 0.0;  // guarded by mutex_; exponentially weighted
  bool stopping_ = false;          // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_CPU_ENGINE_H_
