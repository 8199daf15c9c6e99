#include "lib/engine/layer_engine.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

// Waits until the function that Done() gave has been called, and has its argument.
template <typename T>
class Waiter {
 public:
  auto Done() {
    return [this](absl::StatusOr<T> result) {
      // Notified under the lock: the waiter, and with it this object, may be gone as soon as the lock is free.
      std::lock_guard<std::mutex> lock(mutex_);
      result_ = std::move(result);
      ready_.notify_one();
    };
  }

  absl::StatusOr<T> Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_.wait(lock, [this] { return result_.has_value(); });
    return *std::move(result_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::optional<absl::StatusOr<T>> result_;
};

}  // namespace

absl::Status CheckContext(const CallContext& context) {
  if (context.cancelled && context.cancelled->load(std::memory_order_relaxed)) return CancelledWhileWaiting();
  if (context.deadline <= absl::Now()) {
    return ExpiredWhileWaiting("the deadline passed before the call's work was done");
  }
  return absl::OkStatus();
}

absl::StatusOr<NormalizeResult> Normalize(LayerEngine& engine, NormalizeCall call) {
  Waiter<NormalizeResult> waiter;
  engine.Normalize(std::move(call), waiter.Done());
  return waiter.Wait();
}

absl::StatusOr<FeedForwardResult> FeedForward(LayerEngine& engine, FeedForwardCall call) {
  Waiter<FeedForwardResult> waiter;
  engine.FeedForward(std::move(call), waiter.Done());
  return waiter.Wait();
}

}  // namespace layerd
