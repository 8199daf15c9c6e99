#include "wire/feed_forward_codec.h"

#include <string>
#include <utility>

#include "lib/base/errors.h"
#include "wire/report_codec.h"
#include "wire/shared_memory_codec.h"
#include "wire/spec_codec.h"
#include "wire/tensor_codec.h"

namespace layerd::wire {
namespace {

using W = v1::FeedForwardWeights;

// A weight's place in the message and in lib.
struct WeightField {
  const char* path;
  bool (W::*has)() const;
  const v1::Tensor& (W::*get)() const;
  v1::Tensor* (W::*mutate)();
  std::optional<Tensor> FeedForwardWeights::*member;
};
constexpr WeightField kWeightFields[] = {
    {"weights.gate", &W::has_gate, &W::gate, &W::mutable_gate, &FeedForwardWeights::gate},
    {"weights.up", &W::has_up, &W::up, &W::mutable_up, &FeedForwardWeights::up},
    {"weights.gate_up", &W::has_gate_up, &W::gate_up, &W::mutable_gate_up, &FeedForwardWeights::gate_up},
    {"weights.down", &W::has_down, &W::down, &W::mutable_down, &FeedForwardWeights::down},
    {"weights.gate_scale", &W::has_gate_scale, &W::gate_scale, &W::mutable_gate_scale, &FeedForwardWeights::gate_scale},
    {"weights.up_scale", &W::has_up_scale, &W::up_scale, &W::mutable_up_scale, &FeedForwardWeights::up_scale},
    {"weights.gate_up_scale", &W::has_gate_up_scale, &W::gate_up_scale, &W::mutable_gate_up_scale,
     &FeedForwardWeights::gate_up_scale},
    {"weights.down_scale", &W::has_down_scale, &W::down_scale, &W::mutable_down_scale, &FeedForwardWeights::down_scale},
    {"weights.gate_bias", &W::has_gate_bias, &W::gate_bias, &W::mutable_gate_bias, &FeedForwardWeights::gate_bias},
    {"weights.up_bias", &W::has_up_bias, &W::up_bias, &W::mutable_up_bias, &FeedForwardWeights::up_bias},
    {"weights.gate_up_bias", &W::has_gate_up_bias, &W::gate_up_bias, &W::mutable_gate_up_bias,
     &FeedForwardWeights::gate_up_bias},
    {"weights.down_bias", &W::has_down_bias, &W::down_bias, &W::mutable_down_bias, &FeedForwardWeights::down_bias},
    {"weights.inner_norm_gamma", &W::has_inner_norm_gamma, &W::inner_norm_gamma, &W::mutable_inner_norm_gamma,
     &FeedForwardWeights::inner_norm_gamma},
};

}  // namespace

absl::StatusOr<FeedForwardCall> DecodeCall(const v1::FeedForwardRequest& request, const ReceivedStorage& storage) {
  if (!request.has_input()) return MissingField("input", "expected a tensor, got nothing");
  FeedForwardCall call;
  if (auto status = DecodeLayer(request, call); !status.ok()) return status;
  if (call.layer.empty() && !request.has_weights()) {
    return MissingField("weights", "expected the layer's weights, or layer, got nothing");
  }
  auto input = DecodeTensor(request.input(), storage);
  if (!input.ok()) return Under("input", input.status());
  call.input = *std::move(input);
  const W& from = request.weights();
  for (const WeightField& field : kWeightFields) {
    const auto status =
        DecodeOptionalTensor(field.path, (from.*field.has)(), (from.*field.get)(), storage, call.weights.*field.member);
    if (!status.ok()) return status;
  }
  const auto output_dtype = DecodeOptionalDType("output_dtype", request.output_dtype());
  if (!output_dtype.ok()) return output_dtype.status();
  call.output_dtype = *output_dtype;
  if (auto status = DecodePlace("output_memory", request.has_output_memory(), request.output_memory(), storage,
                                call.output_memory);
      !status.ok()) {
    return status;
  }
  call.verify = request.verify();
  call.intermediates = request.intermediates();
  return call;
}

void EncodeCall(const FeedForwardCall& call, v1::FeedForwardRequest& request, SentStorage& storage) {
  EncodeTensor(call.input, *request.mutable_input(), storage);
  EncodeLayer(call, request);
  for (const WeightField& field : kWeightFields) {
    const std::optional<Tensor>& tensor = call.weights.*field.member;
    if (tensor) EncodeTensor(*tensor, *(request.mutable_weights()->*field.mutate)(), storage);
  }
  if (call.output_dtype) request.set_output_dtype(EncodeDType(*call.output_dtype));
  if (call.output_memory) {
    if (auto place = EncodePlace(*call.output_memory, storage)) *request.mutable_output_memory() = *std::move(place);
  }
  request.set_verify(call.verify);
  request.set_intermediates(call.intermediates);
}

void EncodeResult(const FeedForwardResult& result, v1::FeedForwardResponse& response, SentStorage& storage) {
  const FeedForwardOutputs& outputs = result.outputs;
  EncodeTensor(outputs.output, *response.mutable_output(), storage);
  if (outputs.gate) EncodeTensor(*outputs.gate, *response.mutable_intermediates()->mutable_gate(), storage);
  if (outputs.up) EncodeTensor(*outputs.up, *response.mutable_intermediates()->mutable_up(), storage);
  if (outputs.hidden) EncodeTensor(*outputs.hidden, *response.mutable_intermediates()->mutable_hidden(), storage);
  if (outputs.normed) EncodeTensor(*outputs.normed, *response.mutable_intermediates()->mutable_normed(), storage);
  if (result.report) EncodeReport(*result.report, *response.mutable_report());
  response.set_layer_hash(result.layer_hash);
}

absl::StatusOr<FeedForwardResult> DecodeResult(const v1::FeedForwardResponse& response,
                                               const ReceivedStorage& storage) {
  FeedForwardResult result;
  auto output = DecodeTensor(response.output(), storage);
  if (!output.ok()) return Under("output", output.status());
  result.outputs.output = *std::move(output);
  const auto& inside = response.intermediates();
  FeedForwardOutputs& to = result.outputs;
  for (const auto& status :
       {DecodeOptionalTensor("intermediates.gate", inside.has_gate(), inside.gate(), storage, to.gate),
        DecodeOptionalTensor("intermediates.up", inside.has_up(), inside.up(), storage, to.up),
        DecodeOptionalTensor("intermediates.hidden", inside.has_hidden(), inside.hidden(), storage, to.hidden),
        DecodeOptionalTensor("intermediates.normed", inside.has_normed(), inside.normed(), storage, to.normed)}) {
    if (!status.ok()) return status;
  }
  if (response.has_report()) result.report = DecodeReport(response.report());
  result.layer_hash = response.layer_hash();
  return result;
}

}  // namespace layerd::wire
