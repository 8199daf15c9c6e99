// The engine that computes, on this machine's CPUs.
#ifndef LAYERD_LIB_ENGINE_CPU_ENGINE_H_
#define LAYERD_LIB_ENGINE_CPU_ENGINE_H_

#include <cstdint>

#include "lib/base/parallel.h"
#include "lib/base/worker_pool.h"
#include "lib/engine/call_check.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

struct CpuEngineOptions {
  int threads = 1;                               // computing threads; at least 1
  int queue_calls = 256;                         // calls that may wait; more are refused
  int64_t max_answer_bytes = int64_t{64} << 20;  // a larger answer is refused before anything is computed
  double max_verify_flops = 1e9;                 // a larger layer is not verified
  double at_once_work = 0;                       // a call of less is computed by the thread that brings it; see below
};

// Calls wait in one queue, in order of arrival, for `threads` workers; each may divide its work over the arena, which
// holds as many threads. Calls of less than `at_once_work` (multiply-adds, see CheckCall()) do not wait for a worker to
// wake: the calling thread computes them, unless it brings them while it does so already, from inside `done`. That is for
// callers who bound how many come at a time, as BatchingEngine does.
//
// A call's shapes are checked when it arrives, on the caller's thread; its deadline and
// cancellation then, before its work begins, and between chunks of rows while it lasts.
//
// A full queue is RESOURCE_EXHAUSTED with a delay (see WorkerPool). Memory that cannot be had is RESOURCE_EXHAUSTED too.
// It has no layers of its own: a name is NOT_FOUND (see ResidentEngine). The destructor finishes what was accepted.
class CpuEngine : public LayerEngine {
 public:
  explicit CpuEngine(const CpuEngineOptions& options);

  void Normalize(NormalizeCall call, NormalizeDone done) override;
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override;

  // Worker threads that could be started: options.threads, or fewer where the system refused some.
  int workers() const { return pool_.workers(); }

 private:
  template <typename Result, typename Call, typename Done>
  void Submit(Call call, Done done);

  template <typename Result, typename Call>
  absl::StatusOr<Result> TryToCompute(Call& call) const;
  absl::StatusOr<NormalizeResult> Compute(NormalizeCall& call) const;
  absl::StatusOr<FeedForwardResult> Compute(FeedForwardCall& call) const;

  const CallLimits limits_;
  const double at_once_work_;
  const Arena arena_;
  WorkerPool pool_;  // last: its jobs use the rest
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_CPU_ENGINE_H_
