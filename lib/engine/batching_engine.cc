#include "lib/engine/batching_engine.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

// The engine whose turns this thread is taking. What ends meanwhile on the same thread, inside the inner engine, leaves
// its place to the loop further up the stack: a queue of calls that are answered at once does not pile up there.
thread_local const BatchingEngine* taking_turns = nullptr;

}  // namespace

BatchingEngine::BatchingEngine(const BatchingEngineOptions& options, LayerEngine& inner)
    : options_(options), inner_(inner) {
  if (options_.batch_delay <= absl::ZeroDuration()) return;
  try {
    ripener_ = std::thread([this] { WakeWhenRipe(); });
  } catch (const std::system_error&) {
    // A limit on processes: no call waits for company, then.
  }
}

BatchingEngine::~BatchingEngine() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  ripening_.notify_all();
  idle_.wait(lock, [this] { return running_ == 0 && inside_ == 0 && queue_.size() == 0; });
  lock.unlock();
  if (ripener_.joinable()) ripener_.join();
}

BatchingEngine::Turn BatchingEngine::Begin(bool heavy, size_t calls) {
  ++running_;
  if (heavy) heavy_running_ = true;
  return {heavy, static_cast<int64_t>(calls), Clock::now()};
}

// The last thing that a thread does here: whoever has an answer may end both engines.
void BatchingEngine::Leave() {
  if (running_ == 0 && inside_ == 0 && queue_.size() == 0) idle_.notify_all();
}

template <typename Queued, typename Call, typename Done>
void BatchingEngine::Submit(Call call, Done done) {
  if (!call.layer.empty()) return done(LayerNotFound("layer", call.layer));
  const BatchTraits traits = TraitsOf(call, options_.sizes);
  const bool at_once = traits.part_rows == 0 && (!traits.kind || !ripener_.joinable());
  std::unique_lock<std::mutex> lock(mutex_);
  if (at_once && queue_.size() == 0 && HasRoom(traits.heavy)) {
    const Turn turn = Begin(traits.heavy, 1);
    ++inside_;
    lock.unlock();
    PassOn(inner_, std::move(call), std::move(done), [this, turn] { Finish(turn, {}); });
    lock.lock();
    --inside_;
    Leave();
    return;
  }
  lock.unlock();
  if (auto cost = CheckCall(call, options_.sizes.limits); !cost.ok()) return done(std::move(cost).status());
  if (auto status = CheckContext(call.context); !status.ok()) return done(std::move(status));
  std::unique_ptr<QueuedCall> queued = std::make_unique<Queued>(std::move(call), std::move(done), traits);
  if (auto status = Enqueue(queued); !status.ok()) queued->Fail(std::move(status));
}

// The error where the queue is full. Then calls that nobody waits for leave it first, from time to time.
absl::Status BatchingEngine::CheckQueue(std::unique_lock<std::mutex>& lock) {
  constexpr std::chrono::milliseconds kClearEvery{10};
  if (queue_.size() < options_.queue_calls) return absl::OkStatus();
  if (const auto now = Clock::now(); now - cleared_ >= kClearEvery) {
    cleared_ = now;
    auto unwanted = queue_.TakeUnwanted();
    ++inside_;
    lock.unlock();
    for (auto& [call, error] : unwanted) call->Fail(std::move(error));
    unwanted.clear();
    lock.lock();
    --inside_;
    if (queue_.size() < options_.queue_calls) return absl::OkStatus();
  }
  return QueueFull(queue_.size(), mean_call_seconds_ * static_cast<double>(queue_.size()), "--queue_calls");
}

absl::Status BatchingEngine::CheckAdmission(const CallContext& /*context*/) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto status = CheckQueue(lock);
  Leave();
  return status;
}

// Takes the call over unless it says why not.
absl::Status BatchingEngine::Enqueue(std::unique_ptr<QueuedCall>& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool gathers = ripener_.joinable() && call->traits.kind && !stopping_;
  if (!call->context().waits && (gathers || !HasRoom(call->traits.heavy))) {
    if (auto status = CheckQueue(lock); !status.ok()) return status;
  }
  queue_.Push(std::move(call),
              gathers ? Clock::now() + absl::ToChronoNanoseconds(options_.batch_delay) : Clock::time_point::min());
  if (gathers) ripening_.notify_one();
  TakeTurns(lock);
  Leave();
  return absl::OkStatus();
}

// Begins what there is room for.
void BatchingEngine::TakeTurns(std::unique_lock<std::mutex>& lock) {
  if (taking_turns == this) return;
  const BatchingEngine* const outer = std::exchange(taking_turns, this);
  ++inside_;
  while (running_ < options_.workers) {
    Batch batch = queue_.Pop(/*heavy_too=*/!heavy_running_);
    std::optional<Turn> turn;
    if (!batch.shares.empty()) turn = Begin(batch.shares[0].call->traits.heavy, batch.shares.size());
    if (!turn && batch.unwanted.empty()) break;
    lock.unlock();
    for (auto& [call, error] : batch.unwanted) call->Fail(std::move(error));
    batch.unwanted.clear();
    if (turn) {
      QueuedCall& first = *batch.shares[0].call;
      first.Compute(inner_, std::move(batch.shares),
                    [this, turn = *turn](auto again) { Finish(turn, std::move(again)); });
    }
    lock.lock();
  }
  --inside_;
  taking_turns = outer;
}

void BatchingEngine::Finish(const Turn& turn, std::vector<std::unique_ptr<QueuedCall>> again) {
  const std::chrono::duration<double> took = Clock::now() - turn.begun;
  const double calls_at_a_time = static_cast<double>(turn.calls) * (turn.heavy ? 1 : options_.workers);
  std::unique_lock<std::mutex> lock(mutex_);
  mean_call_seconds_ += 0.125 * (took.count() / calls_at_a_time - mean_call_seconds_);
  --running_;
  if (turn.heavy) heavy_running_ = false;
  for (auto& call : again) queue_.Push(std::move(call));
  TakeTurns(lock);
  Leave();
}

// Lets calls have their turn that have waited for company long enough.
void BatchingEngine::WakeWhenRipe() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ || queue_.NextRipe()) {
    const auto ripe = queue_.NextRipe();
    if (stopping_) {
      queue_.Ripen(Clock::time_point::max());
    } else if (!ripe) {
      ripening_.wait(lock);
    } else {
      ripening_.wait_until(lock, *ripe);
      queue_.Ripen(Clock::now());
    }
    TakeTurns(lock);
    Leave();
  }
}

void BatchingEngine::Normalize(NormalizeCall call, NormalizeDone done) {
  Submit<QueuedNormalize>(std::move(call), std::move(done));
}

void BatchingEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  Submit<QueuedFeedForward>(std::move(call), std::move(done));
}

}  // namespace layerd
