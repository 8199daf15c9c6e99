#include "server/layer_service.h"

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "lib/base/errors.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
#include "wire/normalize_codec.h"
#include "wire/shared_memory_codec.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// One call: remembers whether the caller has gone away, and tells when gRPC is done with it.
class Reactor final : public grpc::ServerUnaryReactor {
 public:
  Reactor(grpc::CallbackServerContext* context, absl::AnyInvocable<void()> on_done)
      : context_(context), on_done_(std::move(on_done)), cancelled_(std::make_shared<std::atomic<bool>>(false)) {}

  std::shared_ptr<const std::atomic<bool>> cancelled() const { return cancelled_; }
  // Those of the call, set while it is decoded.
  wire::RegionsInUse& regions() { return regions_; }

  void FinishWith(const absl::Status& status) {
    if (const auto pushback = wire::PushbackOf(status)) {
      context_->AddTrailingMetadata(wire::kPushbackTrailer, *pushback);
    }
    Finish(wire::EncodeStatus(status));
  }

  void OnCancel() override { cancelled_->store(true, std::memory_order_relaxed); }
  void OnDone() override {
    if (on_done_) on_done_();
    delete this;
  }

 private:
  grpc::CallbackServerContext* const context_;
  absl::AnyInvocable<void()> on_done_;
  const std::shared_ptr<std::atomic<bool>> cancelled_;
  wire::RegionsInUse regions_;
};

template <typename Request>
using CallOf = decltype(wire::DecodeCall(Request(), wire::ReceivedStorage(nullptr)));

template <typename Request>
CallOf<Request> Decode(const Request& message, const SharedRegions* regions, wire::ReceivedStorage storage,
                       wire::RegionsInUse& uses) {
  if (auto status = wire::FindRegions(message, regions, storage, uses); !status.ok()) return status;
  return wire::DecodeCall(message, storage);
}

// The call in `bytes`, which are freed. RESOURCE_EXHAUSTED where memory for it cannot be had.
template <typename Request>
CallOf<Request> ReadCall(grpc::ByteBuffer& bytes, int64_t max_bytes, const SharedRegions* regions,
                         wire::RegionsInUse& uses) {
  try {
    auto message = std::make_shared<Request>();
    auto storage = wire::ReceiveMessage(bytes, max_bytes, message);
    bytes.Clear();
    if (!storage.ok()) return storage.status();
    return Decode(*message, regions, *std::move(storage), uses);
  } catch (const std::bad_alloc&) {
    bytes.Clear();
    return OutOfMemory();
  }
}

// The same, if that is a matter of microseconds.
template <typename Request>
std::optional<CallOf<Request>> ReadCallAtOnce(grpc::ByteBuffer& bytes, int64_t max_bytes, const SharedRegions* regions,
                                              wire::RegionsInUse& uses) {
  // What is copied well within 50 µs.
  constexpr size_t kCopiedAtOnce = 65536;
  if (bytes.Length() <= kCopiedAtOnce) return ReadCall<Request>(bytes, max_bytes, regions, uses);
  try {
    auto message = std::make_shared<Request>();
    auto storage = wire::ReceiveAtOnce(bytes, max_bytes, message);
    if (!storage) return std::nullopt;
    bytes.Clear();
    return Decode(*message, regions, *std::move(storage), uses);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

template <typename Response, typename Result>
absl::Status WriteAnswer(const Result& result, const wire::RegionsInUse& uses, grpc::ByteBuffer& bytes) {
  if (auto status = uses.CheckIntact(); !status.ok()) return status;
  try {
    Response message;
    wire::SentStorage storage;
    uses.AddOutputTo(storage);
    wire::EncodeResult(result, message, storage);
    return wire::SendMessage(message, storage, bytes);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

void Delegate(LayerEngine& engine, NormalizeCall call, NormalizeDone done) {
  engine.Normalize(std::move(call), std::move(done));
}
void Delegate(LayerEngine& engine, FeedForwardCall call, FeedForwardDone done) {
  engine.FeedForward(std::move(call), std::move(done));
}

}  // namespace

LayerService::LayerService(LayerEngine& engine, CallGate& gate, const SharedRegions* regions,
                           const LayerServiceOptions& options)
    : engine_(engine),
      gate_(gate),
      regions_(regions),
      options_(options),
      decoders_(options.decoding_threads, options.queue_calls, "--queue_calls") {}

template <typename Request, typename Response, typename Result>
grpc::ServerUnaryReactor* LayerService::Serve(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) {
  const auto size = static_cast<int64_t>(request->Length());
  const absl::Status entered = gate_.Enter(size);
  auto* reactor =
      new Reactor(context, entered.ok() ? absl::AnyInvocable<void()>([this, size] { gate_.Leave(size); }) : nullptr);
  if (!entered.ok()) {
    reactor->FinishWith(entered);
    return reactor;
  }
  // gRPC owns the bytes until the reactor has finished, and does not look at them again: they are freed once read.
  auto* bytes = const_cast<grpc::ByteBuffer*>(request);
  auto serve = [this, context, response, reactor](CallOf<Request> call) {
    if (!call.ok()) return reactor->FinishWith(call.status());
    call->context.deadline = absl::FromChrono(context->deadline());
    call->context.cancelled = reactor->cancelled();
    Delegate(engine_, *std::move(call), [reactor, response](absl::StatusOr<Result> result) {
      reactor->FinishWith(result.ok() ? WriteAnswer<Response>(*result, reactor->regions(), *response)
                                      : result.status());
    });
  };
  if (auto call = ReadCallAtOnce<Request>(*bytes, options_.max_message_bytes, regions_, reactor->regions())) {
    serve(*std::move(call));
    return reactor;
  }
  const auto status = decoders_.Submit([this, bytes, serve, reactor] {
    serve(ReadCall<Request>(*bytes, options_.max_message_bytes, regions_, reactor->regions()));
  });
  if (!status.ok()) reactor->FinishWith(status);
  return reactor;
}

grpc::ServerUnaryReactor* LayerService::Normalize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Serve<v1::NormalizeRequest, v1::NormalizeResponse, NormalizeResult>(context, request, response);
}

grpc::ServerUnaryReactor* LayerService::FeedForward(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Serve<v1::FeedForwardRequest, v1::FeedForwardResponse, FeedForwardResult>(context, request, response);
}

RowStreamReactor* LayerService::StreamNormalize(grpc::CallbackServerContext* context) {
  return StartNormalizeStream(engine_, gate_, options_.max_message_bytes, context);
}

RowStreamReactor* LayerService::StreamFeedForward(grpc::CallbackServerContext* context) {
  return StartFeedForwardStream(engine_, gate_, options_.max_message_bytes, context);
}

}  // namespace layerd
