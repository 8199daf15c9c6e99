#include "server/layer_service.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "lib/base/errors.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
#include "wire/normalize_codec.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// One call: remembers whether the caller has gone away, and tells when gRPC is done with it.
class Reactor final : public grpc::ServerUnaryReactor {
 public:
  Reactor(grpc::CallbackServerContext* context, absl::AnyInvocable<void()> on_done)
      : context_(context), on_done_(std::move(on_done)), cancelled_(std::make_shared<std::atomic<bool>>(false)) {}

  std::shared_ptr<const std::atomic<bool>> cancelled() const { return cancelled_; }

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
};

void Delegate(LayerEngine& engine, NormalizeCall call, NormalizeDone done) {
  engine.Normalize(std::move(call), std::move(done));
}
void Delegate(LayerEngine& engine, FeedForwardCall call, FeedForwardDone done) {
  engine.FeedForward(std::move(call), std::move(done));
}

}  // namespace

LayerService::LayerService(LayerEngine& engine, const LayerServiceOptions& options)
    : engine_(engine), options_(options), decoders_(options.decoding_threads, options.queue_calls, "--queue_calls") {}

template <typename Request, typename Response, typename Result>
grpc::ServerUnaryReactor* LayerService::Serve(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) {
  const bool entered = Enter();
  auto* reactor = new Reactor(context, entered ? absl::AnyInvocable<void()>([this] { Leave(); }) : nullptr);
  if (!entered) {
    reactor->FinishWith(Draining());
    return reactor;
  }
  // gRPC owns the bytes until the reactor has finished, and does not look at them again: they are freed once read.
  auto* bytes = const_cast<grpc::ByteBuffer*>(request);
  auto serve = [this, context, bytes, response, reactor] {
    auto message = std::make_shared<Request>();
    const absl::Status parsed = wire::ParseMessage(*bytes, options_.max_message_bytes, *message);
    bytes->Clear();
    if (!parsed.ok()) return reactor->FinishWith(parsed);
    auto call = wire::DecodeCall(*message, message);
    if (!call.ok()) return reactor->FinishWith(call.status());
    call->context.deadline = absl::FromChrono(context->deadline());
    call->context.cancelled = reactor->cancelled();
    Delegate(engine_, *std::move(call), [reactor, response](absl::StatusOr<Result> result) {
      if (!result.ok()) return reactor->FinishWith(result.status());
      Response answer;
      wire::EncodeResult(*result, answer);
      reactor->FinishWith(wire::SerializeMessage(answer, *response));
    });
  };
  // What is copied out of gRPC's slices well within 50 µs.
  constexpr size_t kDecodeAtOnceBytes = 65536;
  if (request->Length() <= kDecodeAtOnceBytes) {
    serve();
  } else if (auto status = decoders_.Submit(std::move(serve)); !status.ok()) {
    reactor->FinishWith(status);
  }
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

bool LayerService::Enter() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (draining_) return false;
  ++in_flight_;
  return true;
}

void LayerService::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--in_flight_ == 0) idle_.notify_all();
}

int64_t LayerService::Drain(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  draining_ = true;
  idle_.wait_until(lock, absl::ToChronoTime(deadline), [this] { return in_flight_ == 0; });
  return in_flight_;
}

}  // namespace layerd
