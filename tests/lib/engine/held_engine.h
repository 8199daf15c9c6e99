// An engine that keeps the calls it is given until a test lets them go.
#ifndef LAYERD_TESTS_LIB_ENGINE_HELD_ENGINE_H_
#define LAYERD_TESTS_LIB_ENGINE_HELD_ENGINE_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

// Threads: any.
class HeldEngine : public LayerEngine {
 public:
  void Normalize(NormalizeCall call, NormalizeDone done) override {
    auto shared = std::make_shared<NormalizeDone>(std::move(done));
    Keep({"norm", nullptr, call.inputs.input, call.context, [call, shared](absl::Status status) {
            if (!status.ok()) return (*shared)(std::move(status));
            const Arena arena(1);
            auto outputs = layerd::Normalize(arena, call.spec, call.inputs, call.output_dtype, call.intermediates);
            if (!outputs.ok()) return (*shared)(outputs.status());
            (*shared)(NormalizeResult{.outputs = *std::move(outputs)});
          }});
  }

  void FeedForward(FeedForwardCall call, FeedForwardDone done) override {
    auto shared = std::make_shared<FeedForwardDone>(std::move(done));
    Keep({"layer", call.packed, call.input, call.context, [call, shared](absl::Status status) {
            if (!status.ok()) return (*shared)(std::move(status));
            const Arena arena(1);
            auto outputs = call.packed != nullptr ? layerd::FeedForward(arena, *call.packed, call.input,
                                                                        call.output_dtype, call.intermediates)
                                                  : layerd::FeedForward(arena, call.spec, call.weights, call.input,
                                                                        call.output_dtype, call.intermediates);
            if (!outputs.ok()) return (*shared)(outputs.status());
            (*shared)(FeedForwardResult{.outputs = *std::move(outputs), .layer_hash = "hash"});
          }});
  }

  // A call as it was given.
  struct Held {
    std::string kind;
    std::shared_ptr<const PackedFeedForward> packed;
    Tensor input;
    CallContext context;
    absl::AnyInvocable<void(absl::Status)> answer;  // OK: with what the layer gives
  };

  // Waits until a call is there, and takes the oldest.
  Held Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_.wait(lock, [this] { return !held_.empty(); });
    Held held = std::move(held_.front());
    held_.pop_front();
    return held;
  }
  // Answers the oldest call; returns what it was: "rows×width", or "norm rows×width".
  std::string Answer(absl::Status status = absl::OkStatus()) {
    Held held = Take();
    std::string what = absl::StrCat(held.kind == "norm" ? "norm " : "", held.input.dim(0), "x", held.input.dim(1));
    held.answer(std::move(status));
    return what;
  }
  int64_t count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(held_.size());
  }

 private:
  void Keep(Held held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_.push_back(std::move(held));
    arrived_.notify_one();
  }

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Held> held_;  // guarded by mutex_
};

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_ENGINE_HELD_ENGINE_H_
