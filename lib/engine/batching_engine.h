// The engine that computes together what arrives together: rows of concurrent calls for one resident layer become one
// product. It belongs between ResidentEngine, which knows the layers, and CpuEngine, which computes.
#ifndef LAYERD_LIB_ENGINE_BATCHING_ENGINE_H_
#define LAYERD_LIB_ENGINE_BATCHING_ENGINE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "lib/engine/batch_queue.h"
#include "lib/engine/layer_engine.h"
#include "lib/engine/queued_calls.h"

namespace layerd {

struct BatchingEngineOptions {
  int workers = 1;                                    // calls that the inner engine computes at a time; at least 1
  int queue_calls = 256;                              // calls that may wait; more are refused
  absl::Duration batch_delay = absl::ZeroDuration();  // how long a call waits for others to be joined with
  BatchSizes sizes;
};

// The inner engine has at most `workers` calls at a time, and at most one of a heavy layer (lib/engine/queued_calls.h). A
// call that finds room there is passed on at once, as it is, by its own thread, unless `batch_delay` is set and it could
// be joined with others. All others wait in one queue; lib/engine/batch_queue.h tells in which order they are taken, and
// lib/engine/queued_calls.h how they are joined and divided. Whoever finishes a call, and has given out the answers,
// begins the next one: so while the machine is busy batches form by themselves, and callers that were just answered are
// in time for the next.
//
// Calls that wait have been checked as CpuEngine does; deadline and cancellation are looked at when a batch is formed, and
// when the queue is full. A full queue is RESOURCE_EXHAUSTED with a delay measured from how fast calls are computed. A call that is divided, or
// tried again, is not refused any more.
//
// Threads: any; `done` may be called on a thread of `inner`, which must outlive this. The destructor waits until every
// call is answered.
class BatchingEngine : public LayerEngine {
 public:
  BatchingEngine(const BatchingEngineOptions& options, LayerEngine& inner);
  ~BatchingEngine() override;

  void Normalize(NormalizeCall call, NormalizeDone done) override;
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override;
  absl::Status CheckAdmission(const CallContext& context) override;

 private:
  using Clock = BatchQueue::Clock;
  // One call of the inner engine.
  struct Turn {
    bool heavy;
    int64_t calls;
    Clock::time_point begun;
  };

  template <typename Queued, typename Call, typename Done>
  void Submit(Call call, Done done);
  absl::Status Enqueue(std::unique_ptr<QueuedCall>& call);

  // With mutex_ held.
  absl::Status CheckQueue(std::unique_lock<std::mutex>& lock);
  bool HasRoom(bool heavy) const { return running_ < options_.workers && !(heavy && heavy_running_); }
  Turn Begin(bool heavy, size_t calls);
  void TakeTurns(std::unique_lock<std::mutex>& lock);
  void Leave();

  void Finish(const Turn& turn, std::vector<std::unique_ptr<QueuedCall>> again);
  void WakeWhenRipe();

  const BatchingEngineOptions options_;
  LayerEngine& inner_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::condition_variable ripening_;
  // Guarded by mutex_, from here on.
  BatchQueue queue_;
  Clock::time_point cleared_;  // when calls that nobody waits for were last looked for in a full queue
  int running_ = 0;            // calls of the inner engine that are not finished
  bool heavy_running_ = false;
  int64_t inside_ = 0;              // threads that are in the inner engine, or come back from it
  double mean_call_seconds_ = 0.0;  // from one answer to the next while busy; exponentially weighted
  bool stopping_ = false;
  std::thread ripener_;  // with a batch_delay only
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_BATCHING_ENGINE_H_
