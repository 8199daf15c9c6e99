#include "client/remote_engine.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <condition_variable>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
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
        shared_memory(options.shared_memory),
        layers(channel),
        health(grpc::health::v1::Health::NewStub(channel)) {}

  // Sends `call` to `method` and gives the decoded answer to `done`.
  template <typename Request, typename Response, typename Result, typename Call, typename Done>
  void Send(Call call, const char* method, Done done) {
    if (call.context.cancelled && call.context.cancelled->load(std::memory_order_relaxed)) {
      return done(CancelledWhileWaiting());
    }
    struct State {
      grpc::ClientContext context;
      grpc::ByteBuffer request;
      grpc::ByteBuffer response;
      Done done;
      v1::SharedMemory output;   // what was sent as output_memory
      std::optional<Call> call;  // where its tensors may be read by the server, or its output goes somewhere
    };
    auto state = std::make_unique<State>();
    {
      Request message;
      wire::SentStorage storage;
      for (const auto& memory : shared_memory) {
        v1::SharedMemory reference;
        reference.set_region(memory->region());
        storage.AddShared(memory->memory(), std::move(reference));
      }
      wire::EncodeCall(call, message, storage);
      state->output = message.output_memory();
      if (auto status = wire::SendMessage(message, storage, state->request); !status.ok()) {
        return done(std::move(status));
      }
    }
    state->done = std::move(done);
    if (call.context.deadline != absl::InfiniteFuture()) {
      state->context.set_deadline(absl::ToChronoTime(call.context.deadline));
    }
    if (call.output_memory || !shared_memory.empty()) state->call = std::move(call);
    {
      std::lock_guard<std::mutex> lock(mutex);
      ++under_way;
    }
    State& sent = *state.release();
    layers.UnaryCall(&sent.context, method, grpc::StubOptions(), &sent.request, &sent.response,
                     [this, &sent](const grpc::Status& status) {
                       std::unique_ptr<State> answered(&sent);
                       absl::StatusOr<Result> result =
                           status.ok() ? Read<Response, Result>(sent.response, sent.call, sent.output)
                                       : wire::DecodeStatus(status);
                       Done answer = std::move(sent.done);
                       answered.reset();
                       answer(std::move(result));
                       std::lock_guard<std::mutex> lock(mutex);
                       if (--under_way == 0) idle.notify_all();
                     });
  }

  // `output`: what was sent as output_memory of `call`, which is kept where it has one.
  template <typename Response, typename Result, typename Call>
  static absl::StatusOr<Result> Read(grpc::ByteBuffer& bytes, const std::optional<Call>& call,
                                     const v1::SharedMemory& output) {
    auto message = std::make_shared<Response>();
    auto storage = wire::ReceiveMessage(bytes, std::numeric_limits<int64_t>::max(), message);
    if (!storage.ok()) return MalformedAnswer(absl::StrCat("is none: ", storage.status().message()));
    const v1::SharedMemory& written = message->output().shared_memory();
    if (!output.region().empty() && written.region() == output.region() && written.offset() == output.offset()) {
      storage->AddShared(written, *call->output_memory);
    }
    auto result = wire::DecodeResult(*message, *storage);
    if (!result.ok()) return MalformedAnswer(absl::StrCat("has ", result.status().message()));
    if (call && call->output_memory) {
      if (auto status = PutOutput(*call, result->outputs.output); !status.ok()) return status;
    }
    return result;
  }

  // Copies the output to where the call wants it, unless it is there.
  template <typename Call>
  static absl::Status PutOutput(const Call& call, Tensor& output) {
    if (!output.is_scattered() && output.data() == call.output_memory->data.get()) return absl::OkStatus();
    const auto bytes = static_cast<int64_t>(output.num_bytes());
    if (auto status = CheckOutputMemory(call, output.dtype(), bytes); !status.ok()) return status;
    Tensor there = Tensor::AllocateAt(&*call.output_memory, output.dtype(), output.shape());
    output.CopyTo(there.mutable_data());
    output = std::move(there);
    return absl::OkStatus();
  }

  std::shared_ptr<grpc::Channel> channel;
  const std::vector<std::shared_ptr<const SharedMemory>> shared_memory;
  grpc::GenericStub layers;
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
      std::move(call), "/layerd.v1.LayerService/Normalize", std::move(done));
}

void RemoteEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  impl_->Send<v1::FeedForwardRequest, v1::FeedForwardResponse, FeedForwardResult>(
      std::move(call), "/layerd.v1.LayerService/FeedForward", std::move(done));
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
