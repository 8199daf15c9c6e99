#include "server/layer_service.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "wire/feed_forward_codec.h"
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

template <typename Call, typename Result, typename Request, typename Response>
grpc::ServerUnaryReactor* LayerService::Serve(grpc::CallbackServerContext* context, const Request* request,
                                              Response* response) {
  const bool entered = Enter();
  auto* reactor = new Reactor(context, entered ? absl::AnyInvocable<void()>([this] { Leave(); }) : nullptr);
  if (!entered) {
    reactor->FinishWith(Draining());
    return reactor;
  }
  if (const auto bytes = static_cast<int64_t>(request->ByteSizeLong()); bytes > max_message_bytes_) {
    reactor->FinishWith(TooLarge(
        "", "MESSAGE_TOO_LARGE",
        absl::StrCat("expected a message of at most ", max_message_bytes_, " bytes (--max_message_mib), got ", bytes)));
    return reactor;
  }
  // gRPC keeps the request until the reactor has finished, and nobody reads the call's tensors after that.
  absl::StatusOr<Call> call = wire::DecodeCall(*request, nullptr);
  if (!call.ok()) {
    reactor->FinishWith(call.status());
    return reactor;
  }
  call->context.deadline = absl::FromChrono(context->deadline());
  call->context.cancelled = reactor->cancelled();
  Delegate(engine_, *std::move(call), [reactor, response](absl::StatusOr<Result> result) {
    if (result.ok()) wire::EncodeResult(*result, *response);
    reactor->FinishWith(result.status());
  });
  return reactor;
}

grpc::ServerUnaryReactor* LayerService::Normalize(grpc::CallbackServerContext* context,
                                                  const v1::NormalizeRequest* request,
                                                  v1::NormalizeResponse* response) {
  return Serve<NormalizeCall, NormalizeResult>(context, request, response);
}

grpc::ServerUnaryReactor* LayerService::FeedForward(grpc::CallbackServerContext* context,
                                                    const v1::FeedForwardRequest* request,
                                                    v1::FeedForwardResponse* response) {
  return Serve<FeedForwardCall, FeedForwardResult>(context, request, response);
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
