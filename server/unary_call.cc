#include "server/unary_call.h"

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "lib/base/errors.h"
#include "lib/base/long_work.h"
#include "server/deadline.h"
#include "server/layer_call.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
#include "wire/normalize_codec.h"
#include "wire/shared_memory_codec.h"

namespace layerd {
namespace {

template <typename Kind>
class UnaryCall final : public ServerCall, public StallWatch::Wait {
 public:
  UnaryCall(const UnaryCallContext& service, std::unique_ptr<CallArrival> arrival)
      : ServerCall(std::move(arrival)), service_(service) {
    call_context_.deadline = DeadlineOf(context());
    call_context_.cancelled = cancelled_;
    absl::Status status = entered_ = admission().gate.Enter();
    if (status.ok()) status = service_.engine.CheckAdmission(call_context_);
    if (status.ok()) status = TakeMemory();
    if (!status.ok()) Finish(status);
  }

  void OnReadDone(bool ok) override {
    if (!admission().stall_watch.End(*this)) return;  // ended
    if (!ok) return Finish(NoMessage());
    memory_.ShrinkTo(static_cast<int64_t>(bytes_.Length()));
    if (bytes_.Length() <= wire::kCopiedMessageBytes) {
      grpc::ByteBuffer received;  // freed behind the answer, where that is given at once
      received.Swap(&bytes_);
      return Compute(Read(received));
    }
    BeforeLongWork();
    if (auto call = ReadAtOnce()) return Compute(*std::move(call));
    const auto status = service_.decoders.Submit([this] {
      auto call = Read(bytes_);
      bytes_.Clear();
      Compute(std::move(call));
    });
    if (!status.ok()) Finish(status);
  }

  void OnCancel() override {
    cancelled_->store(true, std::memory_order_relaxed);
    if (admission().messages.Leave(ticket_)) Finish(CancelledWhileWaiting());
  }

  void EndStalled(const absl::Status& status) override {
    if (!answering_) return Finish(status);
    context().TryCancel();  // what it was to say is said
  }

  void OnDone() override {
    if (answering_) admission().stall_watch.End(*this);
    held_ = nullptr;
    memory_ = {};
    if (entered_.ok()) admission().gate.Leave();
    delete this;
  }

 private:
  using Call = typename Kind::Call;
  using Result = typename Kind::Result;

  Admission& admission() const { return service_.admission; }

  absl::Status TakeMemory() {
    if (auto share = admission().messages.TryTake(service_.max_message_bytes)) {
      Receive(*std::move(share));
      return absl::OkStatus();
    }
    auto ticket = admission().messages.Wait(service_.max_message_bytes, call_context_.deadline,
                                            [this](absl::StatusOr<ByteBudget::Share> share) {
                                              share.ok() ? Receive(*std::move(share)) : Finish(share.status());
                                            });
    if (ticket.ok()) ticket_ = *ticket;  // OnCancel(), which looks at it, comes after the constructor
    return std::move(ticket).status();
  }

  void Receive(ByteBudget::Share share) {
    memory_ = std::move(share);
    admission().stall_watch.Begin(*this);
    StartRead(&bytes_);
  }

  // RESOURCE_EXHAUSTED where memory for the call cannot be had.
  absl::StatusOr<Call> Read(grpc::ByteBuffer& bytes) {
    try {
      auto message = std::make_shared<typename Kind::Request>();
      auto storage = wire::ReceiveMessage(bytes, service_.max_message_bytes, message);
      if (!storage.ok()) return storage.status();
      return Decode(*message, *std::move(storage));
    } catch (const std::bad_alloc&) {
      return OutOfMemory();
    }
  }

  // The call in bytes_, which are given back, if that is a matter of microseconds.
  std::optional<absl::StatusOr<Call>> ReadAtOnce() {
    try {
      auto message = std::make_shared<typename Kind::Request>();
      auto storage = wire::ReceiveAtOnce(bytes_, service_.max_message_bytes, message);
      if (!storage) return std::nullopt;
      bytes_.Clear();
      return Decode(*message, *std::move(storage));
    } catch (const std::bad_alloc&) {
      return OutOfMemory();
    }
  }

  absl::StatusOr<Call> Decode(const typename Kind::Request& message, wire::ReceivedStorage storage) {
    if (auto status = wire::FindRegions(message, service_.regions, storage, regions_); !status.ok()) return status;
    return wire::DecodeCall(message, storage);
  }

  void Compute(absl::StatusOr<Call> call) {
    if (!call.ok()) return Finish(call.status());
    call->context = std::move(call_context_);
    Kind::Ask(service_.engine, *std::move(call), [this](absl::StatusOr<Result> result) { Answer(std::move(result)); });
  }

  void Answer(absl::StatusOr<Result> result) {
    const absl::Status status = result.ok() ? Encode(*result) : result.status();
    if (!status.ok()) return Finish(status);
    held_ = std::move(result->held);
    memory_ = {};  // not behind the answer: with that the server may end, and the budget with it
    answering_ = true;
    admission().stall_watch.Begin(*this);
    StartWriteAndFinish(bytes_);
  }

  absl::Status Encode(const Result& result) {
    if (auto status = regions_.CheckIntact(); !status.ok()) return status;
    try {
      typename Kind::Response message;
      wire::SentStorage storage;
      regions_.AddOutputTo(storage);
      wire::EncodeResult(result, message, storage);
      return wire::SendMessage(message, storage, bytes_);
    } catch (const std::bad_alloc&) {
      return OutOfMemory();
    }
  }

  const UnaryCallContext service_;
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  CallContext call_context_;
  absl::Status entered_;
  ByteBudget::Ticket ticket_ = 0;  // in line for memory
  ByteBudget::Share memory_;
  wire::RegionsInUse regions_;
  grpc::ByteBuffer bytes_;  // of the request, then of the answer
  std::shared_ptr<const void> held_;
  std::atomic<bool> answering_ = false;
};

}  // namespace

ServerCall* NewNormalizeCall(const UnaryCallContext& service, std::unique_ptr<CallArrival> arrival) {
  return new UnaryCall<NormalizeKind>(service, std::move(arrival));
}

ServerCall* NewFeedForwardCall(const UnaryCallContext& service, std::unique_ptr<CallArrival> arrival) {
  return new UnaryCall<FeedForwardKind>(service, std::move(arrival));
}

}  // namespace layerd
