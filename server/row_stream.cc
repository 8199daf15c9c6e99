#include "server/row_stream.h"

#include <grpcpp/server_context.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
#include "wire/normalize_codec.h"
#include "wire/status_codec.h"
#include "wire/stream_codec.h"

namespace layerd {
namespace {

struct NormalizeKind {
  using Request = v1::StreamNormalizeRequest;
  using Response = v1::NormalizeResponse;
  using Call = NormalizeCall;
  using Result = NormalizeResult;
  static void Ask(LayerEngine& engine, NormalizeCall call, NormalizeDone done) {
    engine.Normalize(std::move(call), std::move(done));
  }
};

struct FeedForwardKind {
  using Request = v1::StreamFeedForwardRequest;
  using Response = v1::FeedForwardResponse;
  using Call = FeedForwardCall;
  using Result = FeedForwardResult;
  static void Ask(LayerEngine& engine, FeedForwardCall call, FeedForwardDone done) {
    engine.FeedForward(std::move(call), std::move(done));
  }
};

absl::Status LayerChanged() {
  ErrorDetails details;
  details.reason = "LAYER_CHANGED";
  return WithDetails(absl::StatusCode::kAborted, "the layer was replaced while the stream was under way", details);
}

// gRPC calls each On…() on a thread of its own, and the engine answers on its. What they share is guarded by mutex_;
// gRPC's methods are called without it. The stream ends when the engine has nothing of it and nothing is being sent.
template <typename Kind>
class RowStream final : public RowStreamReactor {
 public:
  RowStream(LayerEngine& engine, CallGate& gate, int64_t max_first_bytes, grpc::CallbackServerContext* context)
      : engine_(engine),
        gate_(gate),
        max_first_bytes_(max_first_bytes),
        context_(context),
        cancelled_(std::make_shared<std::atomic<bool>>(false)) {
    std::unique_lock<std::mutex> lock(mutex_);
    error_ = Enter(kMostChunks * kMostChunkBytes);
    Go(lock);
  }

  // Counts as reading until the message is with the engine, so that no other read begins while this thread decodes.
  void OnReadDone(bool ok) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (ok) {
      Chunk& chunk = *chunks_.emplace_back(std::make_unique<Chunk>());
      ++computing_;
      lock.unlock();
      TakeMessage(chunk);
      lock.lock();
    }
    half_closed_ = half_closed_ || !ok;
    reading_ = false;
    Go(lock);
  }

  void OnWriteDone(bool ok) override {
    std::unique_lock<std::mutex> lock(mutex_);
    writing_ = false;
    chunks_.pop_front();
    broken_ = broken_ || !ok;
    Go(lock);
  }

  void OnCancel() override {
    cancelled_->store(true, std::memory_order_relaxed);
    std::unique_lock<std::mutex> lock(mutex_);
    broken_ = true;
    Go(lock);
  }

  void OnDone() override {
    for (const int64_t bytes : entered_) gate_.Leave(bytes);
    delete this;
  }

 private:
  using Call = typename Kind::Call;
  using Result = typename Kind::Result;
  struct Chunk {
    bool answered = false;
    grpc::ByteBuffer bytes;  // of the answer
  };

  absl::Status Enter(int64_t bytes) {
    auto status = gate_.Enter(bytes);
    if (status.ok()) entered_.push_back(bytes);
    return status;
  }

  // The call in message_, whose bytes are given back.
  absl::StatusOr<Call> Decode() {
    const auto size = static_cast<int64_t>(message_.Length());
    const bool is_first = !first_;
    if (is_first && size > kMostChunkBytes) {
      if (auto status = Enter(size); !status.ok()) return status;
    }
    try {
      auto message = std::make_shared<typename Kind::Request>();
      const auto storage = wire::ReceiveMessage(message_, is_first ? max_first_bytes_ : kMostChunkBytes, message);
      message_.Clear();
      if (!storage.ok()) return storage.status();
      auto call = wire::DecodeChunk(*message, *storage, first_);
      if (!call.ok()) return call.status();
      call->context.deadline = absl::FromChrono(context_->deadline());
      call->context.cancelled = cancelled_;
      return call;
    } catch (const std::bad_alloc&) {
      message_.Clear();
      return OutOfMemory();
    }
  }

  static absl::Status Encode(const Result& result, grpc::ByteBuffer& bytes) {
    try {
      typename Kind::Response message;
      wire::SentStorage storage;
      wire::EncodeResult(result, message, storage);
      return wire::SendMessage(message, storage, bytes);
    } catch (const std::bad_alloc&) {
      return OutOfMemory();
    }
  }

  void TakeMessage(Chunk& chunk) {
    auto call = Decode();
    if (!call.ok()) return Answer(chunk, call.status());
    Kind::Ask(engine_, *std::move(call),
              [this, &chunk](absl::StatusOr<Result> result) { Answer(chunk, std::move(result)); });
  }

  void Answer(Chunk& chunk, absl::StatusOr<Result> result) {
    grpc::ByteBuffer bytes;
    absl::Status status = result.ok() ? Encode(*result, bytes) : result.status();
    std::unique_lock<std::mutex> lock(mutex_);
    --computing_;
    if (status.ok() && layer_hash_.empty()) layer_hash_ = result->layer_hash;
    if (status.ok() && layer_hash_ != result->layer_hash) status = LayerChanged();
    if (status.ok()) {
      chunk.bytes = std::move(bytes);
      chunk.answered = true;
    } else {
      End(std::move(status));
    }
    Go(lock);
  }

  // With mutex_ held: the first error is the stream's.
  void End(absl::Status status) {
    if (error_.ok()) error_ = std::move(status);
  }

  // Begins what can be begun, and gives mutex_ back. It is the last thing that a thread does here: the stream may be gone
  // after it.
  void Go(std::unique_lock<std::mutex>& lock) {
    if (finished_) return lock.unlock();
    const bool ending = broken_ || !error_.ok();
    // What was answered before an error is still sent; behind a chunk that has no answer nothing is.
    const bool writes = !broken_ && !writing_ && !chunks_.empty() && chunks_.front()->answered;
    const bool reads = !ending && !half_closed_ && !reading_ && chunks_.size() < kMostChunks;
    // A read that waits for the caller does not hold up an error; what is being decoded counts as computing.
    const bool idle = !writing_ && !writes && computing_ == 0;
    const bool finishes = idle && (ending || (half_closed_ && chunks_.empty()));
    writing_ = writing_ || writes;
    reading_ = reading_ || reads;
    finished_ = finishes;
    grpc::ByteBuffer* const answer = writes ? &chunks_.front()->bytes : nullptr;
    const absl::Status status = error_.ok() && broken_ ? CancelledWhileWaiting() : error_;
    lock.unlock();
    if (reads) StartRead(&message_);
    if (writes) StartWrite(answer);
    if (!finishes) return;
    if (const auto pushback = wire::PushbackOf(status)) {
      context_->AddTrailingMetadata(wire::kPushbackTrailer, *pushback);
    }
    Finish(wire::EncodeStatus(status));
  }

  LayerEngine& engine_;
  CallGate& gate_;
  const int64_t max_first_bytes_;
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<std::atomic<bool>> cancelled_;
  // Of the thread that decodes.
  grpc::ByteBuffer message_;
  std::optional<Call> first_;
  std::vector<int64_t> entered_;  // at the gate

  std::mutex mutex_;
  // Guarded by mutex_, from here on.
  std::deque<std::unique_ptr<Chunk>> chunks_;  // read and not sent yet
  int computing_ = 0;                          // of them, at the engine
  bool reading_ = false;
  bool writing_ = false;
  bool half_closed_ = false;  // the caller has said that this was all
  bool broken_ = false;       // the caller has gone away
  bool finished_ = false;
  absl::Status error_;
  std::string layer_hash_;
};

}  // namespace

RowStreamReactor* StartNormalizeStream(LayerEngine& engine, CallGate& gate, int64_t max_first_bytes,
                                       grpc::CallbackServerContext* context) {
  return new RowStream<NormalizeKind>(engine, gate, max_first_bytes, context);
}

RowStreamReactor* StartFeedForwardStream(LayerEngine& engine, CallGate& gate, int64_t max_first_bytes,
                                         grpc::CallbackServerContext* context) {
  return new RowStream<FeedForwardKind>(engine, gate, max_first_bytes, context);
}

}  // namespace layerd
