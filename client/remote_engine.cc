#include "client/remote_engine.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "layerd/v1/layer_service.grpc.pb.h"
#include "lib/base/errors.h"
#include "wire/feed_forward_codec.h"
#include "wire/normalize_codec.h"
#include "wire/status_codec.h"

namespace layerd {

absl::Status MalformedAnswer(std::string_view what) {
  ErrorDetails details;
  details.reason = kMalformedAnswer;
  return WithDetails(absl::StatusCode::kInternal, absl::StrCat("the server's answer ", std::string(what)), details);
}

struct RemoteEngine::Impl {
  explicit Impl(const RemoteEngineOptions& options)
      : channel(Connect(options.target, options.max_answer_bytes)),
        layers(v1::LayerService::NewStub(channel)),
        health(grpc::health::v1::Health::NewStub(channel)) {}

  // Sends `call` by `method` and gives the decoded answer to `done`.
  template <typename Request, typename Response, typename Result, typename Call, typename Done, typename Method>
  void Send(const Call& call, Done done, Method method) {
    if (call.context.cancelled && call.context.cancelled->load(std::memory_order_relaxed)) {
      return done(CancelledWhileWaiting());
    }
    struct State {
      grpc::ClientContext context;
      Request request;
      std::shared_ptr<Response> response = std::make_shared<Response>();
      Done done;
    };
    auto* state = new State;
    state->done = std::move(done);
    wire::EncodeCall(call, state->request);
    if (call.context.deadline != absl::InfiniteFuture()) {
      state->context.set_deadline(absl::ToChronoTime(call.context.deadline));
    }
    {
      std::lock_guard<std::mutex> lock(mutex);
      ++under_way;
    }
    method(&state->context, &state->request, state->response.get(), [this, state](const grpc::Status& status) {
      absl::StatusOr<Result> result = status.ok() ? wire::DecodeResult(*state->response, state->response)
                                                  : absl::StatusOr<Result>(wire::DecodeStatus(status));
      if (status.ok() && !result.ok()) result = MalformedAnswer(absl::StrCat("has ", result.status().message()));
      Done answer = std::move(state->done);
      delete state;
      answer(std::move(result));
      std::lock_guard<std::mutex> lock(mutex);
      if (--under_way == 0) idle.notify_all();
    });
  }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::LayerService::Stub> layers;
  std::unique_ptr<grpc::health::v1::Health::Stub> health;

  std::mutex mutex;
  std::condition_variable idle;
  int64_t under_way = 0;  // guarded by mutex
};

RemoteEngine::RemoteEngine(const RemoteEngineOptions& options) : impl_(std::make_unique<Impl>(options)) {}

RemoteEngine::~RemoteEngine() {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->idle.wait(lock, [this] { return impl_->under_way == 0; });
}

void RemoteEngine::Normalize(NormalizeCall call, NormalizeDone done) {
  impl_->Send<v1::NormalizeRequest, v1::NormalizeResponse, NormalizeResult>(
      call, std::move(done), [this](auto* context, auto* request, auto* response, auto callback) {
        impl_->layers->async()->Normalize(context, request, response, std::move(callback));
      });
}

void RemoteEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  impl_->Send<v1::FeedForwardRequest, v1::FeedForwardResponse, FeedForwardResult>(
      call, std::move(done), [this](auto* context, auto* request, auto* response, auto callback) {
        impl_->layers->async()->FeedForward(context, request, response, std::move(callback));
      });
}

absl::Status RemoteEngine::CheckHealth(const std::string& service, absl::Duration timeout) {
  using grpc::health::v1::HealthCheckResponse;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  HealthCheckResponse response;
  const grpc::Status status = impl_->health->Check(&context, request, &response);
  if (!status.ok()) return wire::DecodeStatus(status);
  if (response.status() == HealthCheckResponse::SERVING) return absl::OkStatus();
  ErrorDetails details;
  details.reason = "NOT_SERVING";
  return WithDetails(absl::StatusCode::kUnavailable,
                     absl::StrCat("the server says ", HealthCheckResponse::ServingStatus_Name(response.status())),
                     details);
}

}  // namespace layerd
