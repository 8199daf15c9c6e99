#include "client/row_stream.h"

#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/message_stream.h"
#include "client/remote_engine.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
#include "wire/normalize_codec.h"
#include "wire/stream_codec.h"

namespace layerd {
namespace {

template <typename Kind>
struct Wire;

template <>
struct Wire<NormalizeStreamKind> {
  using Request = v1::StreamNormalizeRequest;
  using Response = v1::NormalizeResponse;
  static constexpr char kMethod[] = "/layerd.v1.LayerService/StreamNormalize";
  static constexpr bool kKeepsWidth = true;  // an answer is as wide as its input
  static const Tensor& InputOf(const NormalizeCall& call) { return call.inputs.input; }
  static void Encode(const NormalizeChunk& rows, Request& request, wire::SentStorage& storage) {
    wire::EncodeChunk(rows.input, rows.residual, rows.gate, request, storage);
  }
};

template <>
struct Wire<FeedForwardStreamKind> {
  using Request = v1::StreamFeedForwardRequest;
  using Response = v1::FeedForwardResponse;
  static constexpr char kMethod[] = "/layerd.v1.LayerService/StreamFeedForward";
  static constexpr bool kKeepsWidth = false;
  static const Tensor& InputOf(const FeedForwardCall& call) { return call.input; }
  static void Encode(const FeedForwardChunk& rows, Request& request, wire::SentStorage& storage) {
    wire::EncodeChunk(rows.input, request, storage);
  }
};

// The paths of errors are those of a call, whichever message it came in.
absl::Status AsOfCall(absl::Status status) {
  const std::string field = DetailsOf(status).field;
  constexpr std::string_view kCall = "call.";
  if (field.rfind(kCall, 0) != 0) return status;
  return Renamed(field, std::string_view(field).substr(kCall.size()), status);
}

}  // namespace

template <typename Kind>
RowStream<Kind>::RowStream(std::shared_ptr<grpc::Channel> channel, const Call& first)
    : output_dtype_(first.output_dtype),
      stream_(std::make_unique<MessageStream>(std::move(channel), Wire<Kind>::kMethod, first.context.deadline)) {
  Send(Wire<Kind>::InputOf(first), [&first](typename Wire<Kind>::Request& request, wire::SentStorage& storage) {
    wire::EncodeFirstChunk(first, request, storage);
  });
}

template <typename Kind>
RowStream<Kind>::~RowStream() = default;

template <typename Kind>
bool RowStream<Kind>::Write(const Rows& rows) {
  return Send(rows.input, [&rows](typename Wire<Kind>::Request& request, wire::SentStorage& storage) {
    Wire<Kind>::Encode(rows, request, storage);
  });
}

template <typename Kind>
template <typename Encode>
bool RowStream<Kind>::Send(const Tensor& input, Encode encode) {
  grpc::ByteBuffer bytes;
  try {
    typename Wire<Kind>::Request request;
    wire::SentStorage storage;
    encode(request, storage);
    if (auto status = wire::SendMessage(request, storage, bytes); !status.ok()) return Fail(std::move(status)), false;
  } catch (const std::bad_alloc&) {
    return Fail(OutOfMemory()), false;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (all_sent_) return false;
    asked_.push_back({output_dtype_.value_or(input.dtype()), input.shape()});
  }
  return stream_->Write(bytes);
}

template <typename Kind>
void RowStream<Kind>::WritesDone() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    all_sent_ = true;
  }
  stream_->WritesDone();
}

template <typename Kind>
absl::StatusOr<std::optional<typename RowStream<Kind>::Result>> RowStream<Kind>::Read() {
  if (!end_) {
    grpc::ByteBuffer bytes;
    if (stream_->Read(bytes)) {
      auto result = Take(bytes);
      if (result.ok()) return std::optional<Result>(*std::move(result));
      Fail(std::move(result).status());
    }
    end_ = End();
  }
  if (!end_->ok()) return *end_;
  return std::optional<Result>();
}

// The answer in `bytes`, to the first message that has none yet.
template <typename Kind>
absl::StatusOr<typename RowStream<Kind>::Result> RowStream<Kind>::Take(grpc::ByteBuffer& bytes) {
  Asked asked;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (asked_.empty()) return MalformedAnswer("came before it was asked for");
    asked = std::move(asked_.front());
    asked_.pop_front();
  }
  const auto message = std::make_shared<typename Wire<Kind>::Response>();
  const auto storage = wire::ReceiveMessage(bytes, std::numeric_limits<int64_t>::max(), message);
  if (!storage.ok()) return MalformedAnswer(absl::StrCat("is none: ", storage.status().message()));
  absl::StatusOr<Result> result = wire::DecodeResult(*message, *storage);
  if (!result.ok()) return MalformedAnswer(absl::StrCat("has ", result.status().message()));
  const Tensor& output = result->outputs.output;
  Shape shape = output.shape();
  if (!Wire<Kind>::kKeepsWidth && !shape.empty() && !asked.shape.empty()) asked.shape.back() = shape.back();
  if (output.dtype() != asked.dtype || shape != asked.shape) {
    return MalformedAnswer(absl::StrCat("has the output ", std::string(Name(output.dtype())), " ", ToString(shape),
                                        ", expected ", std::string(Name(asked.dtype)), " ", ToString(asked.shape)));
  }
  return result;
}

template <typename Kind>
void RowStream<Kind>::Fail(absl::Status status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) failure_ = std::move(status);
  }
  stream_->Cancel();
}

// How the stream ended. It is over, or was cancelled.
template <typename Kind>
absl::Status RowStream<Kind>::End() {
  absl::Status status = stream_->Finish();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.ok()) return failure_;
  if (!status.ok()) return AsOfCall(std::move(status));
  if (!all_sent_) return MalformedAnswer("ends before all rows were sent");
  if (!asked_.empty()) return MalformedAnswer("ends before all rows were answered");
  return absl::OkStatus();
}

template <typename Kind>
absl::Status RowStream<Kind>::Finish() {
  WritesDone();
  while (true) {
    const auto answer = Read();
    if (!answer.ok()) return answer.status();
    if (!answer->has_value()) return absl::OkStatus();
  }
}

template <typename Kind>
void RowStream<Kind>::Cancel() {
  stream_->Cancel();
}

template class RowStream<NormalizeStreamKind>;
template class RowStream<FeedForwardStreamKind>;

}  // namespace layerd
