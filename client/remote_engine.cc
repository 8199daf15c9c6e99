#include "client/remote_engine.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "client/streamed_call.h"
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

namespace {

// No server refuses so few bytes of rows for their size.
constexpr int64_t kLeastRefusedBytes = 65536;

const Tensor& InputOf(const NormalizeCall& call) { return call.inputs.input; }
const Tensor& InputOf(const FeedForwardCall& call) { return call.input; }

absl::Status CheckFit(const NormalizeCall& call) { return CheckNormalize(call.spec, call.inputs).status(); }
absl::Status CheckFit(const FeedForwardCall& call) {
  return CheckFeedForward(call.spec, call.weights, call.input).status();
}

// Whether a server has refused request or answer for its size, in its own words or in gRPC's.
bool IsTooLarge(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kResourceExhausted) return false;
  const std::string reason = DetailsOf(status).reason;
  return reason.empty() || reason == "MESSAGE_TOO_LARGE" || reason == "ANSWER_TOO_LARGE";
}

}  // namespace

struct RemoteEngine::Impl {
  explicit Impl(const RemoteEngineOptions& options)
      : stream_from_bytes(options.stream_from_bytes),
        stream_chunk_bytes(options.stream_chunk_bytes),
        channel(Connect(options.target, options.max_answer_bytes)),
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
                       sent.call.reset();
                       sent.done(std::move(result));
                       answered.reset();  // takes a while, and nobody waits for it
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

  // Whether the server has memory of the call's rows, or of its output.
  bool IsShared(const NormalizeCall& call) const { return IsShared(call.inputs.input, call.output_memory); }
  bool IsShared(const FeedForwardCall& call) const { return IsShared(call.input, call.output_memory); }
  bool IsShared(const Tensor& input, const std::optional<MemoryPlace>& output) const {
    return std::any_of(shared_memory.begin(), shared_memory.end(), [&](const auto& memory) {
      const absl::Span<const std::byte> all = memory->memory();
      const auto in = [&](const std::byte* data) {
        return std::less_equal<>()(all.data(), data) && std::less<>()(data, all.data() + all.size());
      };
      return (output && in(output->data.get())) || (!input.is_scattered() && in(input.data()));
    });
  }

  // The same by a stream of its rows, on a thread of the call's own.
  template <typename Call, typename Done>
  void Stream(Call call, Done done) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ++under_way;
    }
    const auto work =
        std::make_shared<absl::AnyInvocable<void()>>([this, sent = std::move(call), done = std::move(done)]() mutable {
          auto result = CallByStream(channel, sent, stream_chunk_bytes);
          if (result.ok() && sent.output_memory) {
            if (auto status = PutOutput(sent, result->outputs.output); !status.ok()) result = std::move(status);
          }
          sent = Call();
          done(std::move(result));
          std::lock_guard<std::mutex> lock(mutex);
          if (--under_way == 0) idle.notify_all();
        });
    try {
      std::thread([work] { (*work)(); }).detach();
    } catch (const std::system_error&) {
      (*work)();  // without a thread the caller waits
    }
  }

  // Sends `call` whichever way suits its size; by a stream, too, where one message turns out to be too large.
  template <typename Request, typename Response, typename Result, typename Call, typename Done>
  void Ask(Call call, const char* method, Done done) {
    const int64_t bytes = IsShared(call) ? 0 : DivisibleBytes(call);
    if (bytes == 0 && call.layer.empty() && InputOf(call).num_bytes() >= static_cast<size_t>(stream_from_bytes)) {
      // It would go in one message, however large: not where it is certain to be refused.
      if (auto status = CheckFit(call); !status.ok()) return done(std::move(status));
    }
    if (bytes > 0 && bytes >= stream_from_bytes) return Stream(std::move(call), std::move(done));
    if (bytes < kLeastRefusedBytes) return Send<Request, Response, Result>(call, method, std::move(done));
    Done streams_what_is_too_large = [this, call, done = std::move(done)](absl::StatusOr<Result> result) mutable {
      if (!IsTooLarge(result.status())) return done(std::move(result));
      Stream(std::move(call), std::move(done));
    };
    Send<Request, Response, Result>(call, method, std::move(streams_what_is_too_large));
  }

  const int64_t stream_from_bytes;
  const int64_t stream_chunk_bytes;
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
  impl_->Ask<v1::NormalizeRequest, v1::NormalizeResponse, NormalizeResult>(
      std::move(call), "/layerd.v1.LayerService/Normalize", std::move(done));
}

void RemoteEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  impl_->Ask<v1::FeedForwardRequest, v1::FeedForwardResponse, FeedForwardResult>(
      std::move(call), "/layerd.v1.LayerService/FeedForward", std::move(done));
}

std::unique_ptr<NormalizeStream> RemoteEngine::StreamNormalize(const NormalizeCall& call) {
  return std::make_unique<NormalizeStream>(impl_->channel, call);
}

std::unique_ptr<FeedForwardStream> RemoteEngine::StreamFeedForward(const FeedForwardCall& call) {
  return std::make_unique<FeedForwardStream>(impl_->channel, call);
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
