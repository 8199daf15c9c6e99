#include "wire/stream_codec.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/layers/layer.h"
#include "wire/feed_forward_codec.h"
#include "wire/normalize_codec.h"
#include "wire/shared_memory_codec.h"
#include "wire/tensor_codec.h"

namespace layerd::wire {
namespace {

// Whether the message is as its place in the stream asks: the first has a call, the others rows.
template <typename Request>
absl::Status CheckPlace(const Request& request, bool is_first, bool has_rows) {
  if (is_first && !request.has_call()) return MissingField("call", "expected the stream's first message to have it");
  if (is_first && has_rows) {
    return InvalidField("input", "UNEXPECTED_FIELD", "expected the first message to have its rows in call.input");
  }
  if (!is_first && request.has_call()) {
    return InvalidField("call", "UNEXPECTED_FIELD", "expected it in the stream's first message only");
  }
  if (!is_first && !request.has_input()) return MissingField("input", "expected a tensor, got nothing");
  return absl::OkStatus();
}

// Rows of one stream are all of one kind.
absl::Status CheckLikeFirst(const Tensor& first, const Tensor& rows) {
  if (rows.dtype() != first.dtype()) {
    return InvalidField("input.dtype", "DTYPE_MISMATCH",
                        absl::StrCat("expected ", std::string(Name(first.dtype())), " as in the first message, got ",
                                     std::string(Name(rows.dtype()))));
  }
  if (rows.rank() == 0 || first.rank() == 0 || rows.shape().back() == first.shape().back()) return absl::OkStatus();
  return InvalidField("input.shape", "SHAPE_MISMATCH",
                      absl::StrCat("expected the last dimension ", first.shape().back(),
                                   " as in the first message, got ", ToString(rows.shape())));
}

// Without it the rows would be another layer's; the gate's place is said by the spec.
absl::Status CheckResidual(bool first_has, bool has) {
  if (first_has && !has) return MissingField("residual", "expected a tensor, as in the first message, got nothing");
  if (first_has || !has) return absl::OkStatus();
  return InvalidField("residual", "UNEXPECTED_FIELD", "expected nothing, since the first message had none");
}

Tensor OutlineOf(const Tensor& tensor) { return Tensor::WithoutData(tensor.dtype(), tensor.shape()); }

// What is left is for all chunks: without rows, but their outline, and in memory of its own.
void Keep(NormalizeCall& call) {
  call.inputs.input = OutlineOf(call.inputs.input);
  if (call.inputs.residual) call.inputs.residual = OutlineOf(*call.inputs.residual);
  call.inputs.gate.reset();
  if (call.inputs.gamma) call.inputs.gamma = call.inputs.gamma->Together();
  if (call.inputs.beta) call.inputs.beta = call.inputs.beta->Together();
}
void Keep(FeedForwardCall& call) {
  call.input = OutlineOf(call.input);
  GatherWeights(call.weights);
}

template <typename Request, typename Call>
absl::StatusOr<Call> DecodeFirst(const Request& request, const ReceivedStorage& storage, std::optional<Call>& first) {
  auto call = DecodeCall(request.call(), storage);
  if (!call.ok()) return Under("call", call.status());
  first = *call;
  Keep(*first);
  return call;
}

}  // namespace

absl::StatusOr<NormalizeCall> DecodeChunk(const v1::StreamNormalizeRequest& request, const ReceivedStorage& storage,
                                          std::optional<NormalizeCall>& first) {
  if (auto status = CheckNoSharedMemory(request); !status.ok()) return status;
  const bool has_rows = request.has_input() || request.has_residual() || request.has_gate();
  if (auto status = CheckPlace(request, !first, has_rows); !status.ok()) return status;
  if (!first) return DecodeFirst(request, storage, first);
  NormalizeCall call = *first;
  auto input = DecodeTensor(request.input(), storage);
  if (!input.ok()) return Under("input", input.status());
  if (auto status = CheckLikeFirst(first->inputs.input, *input); !status.ok()) return status;
  call.inputs.input = *std::move(input);
  if (auto status = CheckResidual(first->inputs.residual.has_value(), request.has_residual()); !status.ok()) {
    return status;
  }
  for (const auto& status :
       {DecodeOptionalTensor("residual", request.has_residual(), request.residual(), storage, call.inputs.residual),
        DecodeOptionalTensor("gate", request.has_gate(), request.gate(), storage, call.inputs.gate)}) {
    if (!status.ok()) return status;
  }
  return call;
}

absl::StatusOr<FeedForwardCall> DecodeChunk(const v1::StreamFeedForwardRequest& request, const ReceivedStorage& storage,
                                            std::optional<FeedForwardCall>& first) {
  if (auto status = CheckNoSharedMemory(request); !status.ok()) return status;
  if (auto status = CheckPlace(request, !first, request.has_input()); !status.ok()) return status;
  if (!first) return DecodeFirst(request, storage, first);
  FeedForwardCall call = *first;
  auto input = DecodeTensor(request.input(), storage);
  if (!input.ok()) return Under("input", input.status());
  if (auto status = CheckLikeFirst(first->input, *input); !status.ok()) return status;
  call.input = *std::move(input);
  return call;
}

void EncodeFirstChunk(const NormalizeCall& call, v1::StreamNormalizeRequest& request, SentStorage& storage) {
  EncodeCall(call, *request.mutable_call(), storage);
}

void EncodeFirstChunk(const FeedForwardCall& call, v1::StreamFeedForwardRequest& request, SentStorage& storage) {
  EncodeCall(call, *request.mutable_call(), storage);
}

void EncodeChunk(const Tensor& input, const std::optional<Tensor>& residual, const std::optional<Tensor>& gate,
                 v1::StreamNormalizeRequest& request, SentStorage& storage) {
  EncodeTensor(input, *request.mutable_input(), storage);
  if (residual) EncodeTensor(*residual, *request.mutable_residual(), storage);
  if (gate) EncodeTensor(*gate, *request.mutable_gate(), storage);
}

void EncodeChunk(const Tensor& input, v1::StreamFeedForwardRequest& request, SentStorage& storage) {
  EncodeTensor(input, *request.mutable_input(), storage);
}

}  // namespace layerd::wire
