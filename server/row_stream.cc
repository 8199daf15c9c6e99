#include "server/row_stream.h"

#include <grpcpp/alarm.h>
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/long_work.h"
#include "server/deadline.h"
#include "server/layer_call.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
#include "wire/normalize_codec.h"
#include "wire/stream_codec.h"

namespace layerd {
namespace {

absl::Status LayerChanged() {
  ErrorDetails details;
  details.reason = "LAYER_CHANGED";
  return WithDetails(absl::StatusCode::kAborted, "the layer was replaced while the stream was under way", details);
}

// When a message for which there was no room is tried again: as the error says, but within these.
constexpr int64_t kSoonestRetryMs = 1, kLatestRetryMs = 1000;

// A read or a write of a stream that waits for its caller.
class StreamWait final : public StallWatch::Wait {
 public:
  explicit StreamWait(std::function<void(const absl::Status&)> end) : end_(std::move(end)) {}
  void EndStalled(const absl::Status& status) override { end_(status); }

 private:
  const std::function<void(const absl::Status&)> end_;
};

// The On…() come on any threads of the loop, and the engine answers on its own. What they share is guarded by mutex_;
// gRPC's methods are called without it. The stream ends when the engine has nothing of it and nothing is being sent.
template <typename Kind>
class RowStream final : public ServerCall {
 public:
  RowStream(LayerEngine& engine, Admission& admission, int64_t max_first_bytes, std::unique_ptr<CallArrival> arrival)
      : ServerCall(std::move(arrival)),
        engine_(engine),
        admission_(admission),
        max_first_bytes_(max_first_bytes),
        read_wait_([this](const absl::Status& status) { EndStalledRead(status); }),
        write_wait_([this](const absl::Status&) { context().TryCancel(); }) {
    call_context_.deadline = DeadlineOf(context());
    call_context_.cancelled = cancelled_;
    call_context_.waits = true;
    absl::Status status = entered_ = admission_.gate.Enter();
    if (status.ok()) {
      auto ticket = admission_.messages.Wait(max_first_bytes_ + (kMostChunks - 1) * kMostChunkBytes,
                                             call_context_.deadline, [this](absl::StatusOr<ByteBudget::Share> share) {
                                               std::unique_lock<std::mutex> lock(mutex_);
                                               if (share.ok()) {
                                                 memory_ = *std::move(share);
                                               } else {
                                                 End(share.status());
                                               }
                                               queued_ = false;
                                               Go(lock);
                                             });
      if (ticket.ok()) ticket_ = *ticket;  // OnCancel(), which looks at it, comes after the constructor
      status = std::move(ticket).status();
    }
    if (status.ok()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    queued_ = false;
    End(std::move(status));
    Go(lock);
  }

  // Counts as reading until the message is with the engine, so that no other read begins while this thread decodes.
  void OnReadDone(bool ok) override {
    admission_.stall_watch.End(read_wait_);
    std::unique_lock<std::mutex> lock(mutex_);
    if (ok) {
      Chunk& chunk = *chunks_.emplace_back(std::make_unique<Chunk>());
      ++computing_;
      lock.unlock();
      BeforeLongWork();
      TakeMessage(chunk);
      lock.lock();
    }
    half_closed_ = half_closed_ || !ok;
    reading_ = false;
    Go(lock);
  }

  void OnWriteDone(bool ok) override {
    admission_.stall_watch.End(write_wait_);
    std::unique_lock<std::mutex> lock(mutex_);
    writing_ = false;
    chunks_.pop_front();
    broken_ = broken_ || !ok;
    Go(lock);
  }

  void OnCancel() override {
    cancelled_->store(true, std::memory_order_relaxed);
    const bool left = admission_.messages.Leave(ticket_);
    std::unique_lock<std::mutex> lock(mutex_);
    if (left) queued_ = false;
    broken_ = true;
    Go(lock);
  }

  void OnDone() override {
    admission_.stall_watch.End(read_wait_);
    chunks_.clear();
    memory_ = {};
    if (entered_.ok()) admission_.gate.Leave();
    delete this;
  }

 private:
  using Call = typename Kind::Call;
  using Result = typename Kind::Result;
  struct Chunk {
    Call call;  // until it is answered
    std::unique_ptr<grpc::Alarm> retry;
    bool answered = false;
    grpc::ByteBuffer bytes;  // of the answer
    std::shared_ptr<const void> held;
  };

  void EndStalledRead(const absl::Status& status) {
    std::unique_lock<std::mutex> lock(mutex_);
    End(status);
    Go(lock);
  }

  // The call in message_, whose bytes are given back.
  absl::StatusOr<Call> Decode() {
    const auto size = static_cast<int64_t>(message_.Length());
    const bool is_first = !first_;
    if (is_first) memory_.ShrinkTo(std::max(size, kMostChunkBytes) + (kMostChunks - 1) * kMostChunkBytes);
    if (!is_first && size > kMostChunkBytes) {
      message_.Clear();
      return TooLarge("", "MESSAGE_TOO_LARGE",
                      absl::StrCat("expected rows in a message of at most ", kMostChunkBytes, " bytes, got ", size));
    }
    try {
      auto message = std::make_shared<typename Kind::StreamRequest>();
      const auto storage = wire::ReceiveMessage(message_, is_first ? max_first_bytes_ : kMostChunkBytes, message);
      message_.Clear();
      if (!storage.ok()) return storage.status();
      auto call = wire::DecodeChunk(*message, *storage, first_);
      if (!call.ok()) return call.status();
      call->context = call_context_;
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
    chunk.call = *std::move(call);
    Ask(chunk);
  }

  void Ask(Chunk& chunk) {
    Kind::Ask(engine_, chunk.call, [this, &chunk](absl::StatusOr<Result> result) { Answer(chunk, std::move(result)); });
  }

  void Answer(Chunk& chunk, absl::StatusOr<Result> result) {
    if (const auto delay_ms = DetailsOf(result.status()).retry_delay_ms; delay_ms && *delay_ms >= 0) {
      const auto delay = absl::Milliseconds(std::clamp(*delay_ms, kSoonestRetryMs, kLatestRetryMs));
      chunk.retry =
          std::make_unique<grpc::Alarm>();  // a new one each time: the last one may be what has asked just now
      return chunk.retry->Set(absl::ToChronoTime(absl::Now() + delay), [this, &chunk](bool) { Ask(chunk); });
    }
    chunk.call = {};
    grpc::ByteBuffer bytes;
    absl::Status status = result.ok() ? Encode(*result, bytes) : result.status();
    if (result.ok()) chunk.held = result->held;
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
    const bool reads = !ending && !queued_ && !half_closed_ && !reading_ && chunks_.size() < kMostChunks;
    // A read that waits for the caller does not hold up an error; what is being decoded counts as computing.
    const bool idle = !queued_ && !writing_ && !writes && computing_ == 0;
    const bool finishes = idle && (ending || (half_closed_ && chunks_.empty()));
    writing_ = writing_ || writes;
    reading_ = reading_ || reads;
    finished_ = finishes;
    grpc::ByteBuffer* const answer = writes ? &chunks_.front()->bytes : nullptr;
    const absl::Status status = error_.ok() && broken_ ? CancelledWhileWaiting() : error_;
    lock.unlock();
    if (reads) {
      admission_.stall_watch.Begin(read_wait_);
      StartRead(&message_);
    }
    if (writes) {
      admission_.stall_watch.Begin(write_wait_);
      StartWrite(*answer);
    }
    if (finishes) Finish(status);
  }

  LayerEngine& engine_;
  Admission& admission_;
  const int64_t max_first_bytes_;
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  CallContext call_context_;
  absl::Status entered_;
  ByteBudget::Ticket ticket_ = 0;  // in line for memory
  StreamWait read_wait_, write_wait_;
  // Of the thread that decodes.
  grpc::ByteBuffer message_;
  std::optional<Call> first_;
  ByteBudget::Share memory_;

  std::mutex mutex_;
  // Guarded by mutex_, from here on.
  std::deque<std::unique_ptr<Chunk>> chunks_;  // read and not sent yet
  int computing_ = 0;                          // of them, at the engine, or to be brought there again
  bool queued_ = true;                         // in line for memory
  bool reading_ = false;
  bool writing_ = false;
  bool half_closed_ = false;  // the caller has said that this was all
  bool broken_ = false;       // the caller has gone away
  bool finished_ = false;
  absl::Status error_;
  std::string layer_hash_;
};

}  // namespace

ServerCall* NewNormalizeStream(LayerEngine& engine, Admission& admission, int64_t max_first_bytes,
                               std::unique_ptr<CallArrival> arrival) {
  return new RowStream<NormalizeKind>(engine, admission, max_first_bytes, std::move(arrival));
}

ServerCall* NewFeedForwardStream(LayerEngine& engine, Admission& admission, int64_t max_first_bytes,
                                 std::unique_ptr<CallArrival> arrival) {
  return new RowStream<FeedForwardKind>(engine, admission, max_first_bytes, std::move(arrival));
}

}  // namespace layerd
