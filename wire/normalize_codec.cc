#include "wire/normalize_codec.h"

#include <string>
#include <utility>

#include "lib/base/errors.h"
#include "wire/enum_codec.h"
#include "wire/report_codec.h"
#include "wire/tensor_codec.h"

namespace layerd::wire {
namespace {

constexpr std::pair<v1::NormKind, NormKind> kKinds[] = {
    {v1::NORM_KIND_RMS_NORM, NormKind::kRmsNorm},
    {v1::NORM_KIND_LAYER_NORM, NormKind::kLayerNorm},
};
constexpr std::pair<v1::NormRounding, NormRounding> kRoundings[] = {
    {v1::NORM_ROUNDING_BEFORE_GAMMA, NormRounding::kBeforeGamma},
    {v1::NORM_ROUNDING_AFTER_GAMMA, NormRounding::kAfterGamma},
};
constexpr std::pair<v1::GatePosition, GatePosition> kGatePositions[] = {
    {v1::GATE_POSITION_NONE, GatePosition::kNone},
    {v1::GATE_POSITION_FIRST, GatePosition::kFirst},
    {v1::GATE_POSITION_LAST, GatePosition::kLast},
};

absl::StatusOr<NormalizeSpec> DecodeSpec(const v1::NormalizeSpec& message) {
  NormalizeSpec spec;
  const auto kind = DecodeEnum("spec.kind", message.kind(), kKinds, v1::NormKind_Name);
  if (!kind.ok()) return kind.status();
  spec.kind = *kind;
  if (message.has_epsilon()) spec.epsilon = message.epsilon();
  if (message.rounding() != v1::NORM_ROUNDING_UNSPECIFIED) {
    const auto rounding = DecodeEnum("spec.rounding", message.rounding(), kRoundings, v1::NormRounding_Name);
    if (!rounding.ok()) return rounding.status();
    spec.rounding = *rounding;
  }
  spec.gamma_offset = message.gamma_offset();
  spec.group_size = message.group_size();
  if (message.has_gate_position()) {
    const auto position =
        DecodeEnum("spec.gate_position", message.gate_position(), kGatePositions, v1::GatePosition_Name);
    if (!position.ok()) return position.status();
    spec.gate_position = *position;
  }
  if (message.has_normalized_axes()) spec.normalized_axes = message.normalized_axes();
  return spec;
}

void EncodeSpec(const NormalizeSpec& spec, v1::NormalizeSpec& message) {
  message.set_kind(EncodeEnum(spec.kind, kKinds));
  if (spec.epsilon) message.set_epsilon(*spec.epsilon);
  message.set_rounding(EncodeEnum(spec.rounding, kRoundings));
  message.set_gamma_offset(spec.gamma_offset);
  message.set_group_size(spec.group_size);
  message.set_gate_position(EncodeEnum(spec.gate_position, kGatePositions));
  message.set_normalized_axes(spec.normalized_axes);
}

}  // namespace

absl::StatusOr<NormalizeCall> DecodeCall(const v1::NormalizeRequest& request,
                                         const std::shared_ptr<const void>& owner) {
  if (!request.has_input()) return MissingField("input", "expected a tensor, got nothing");
  if (!request.has_spec()) return MissingField("spec", "expected what to compute, got nothing");
  NormalizeCall call;
  auto spec = DecodeSpec(request.spec());
  if (!spec.ok()) return spec.status();
  call.spec = *spec;
  auto input = DecodeTensor(request.input(), owner);
  if (!input.ok()) return Under("input", input.status());
  call.inputs.input = *std::move(input);
  for (const auto& status :
       {DecodeOptionalTensor("gamma", request.has_gamma(), request.gamma(), owner, call.inputs.gamma),
        DecodeOptionalTensor("beta", request.has_beta(), request.beta(), owner, call.inputs.beta),
        DecodeOptionalTensor("residual", request.has_residual(), request.residual(), owner, call.inputs.residual),
        DecodeOptionalTensor("gate", request.has_gate(), request.gate(), owner, call.inputs.gate)}) {
    if (!status.ok()) return status;
  }
  const auto output_dtype = DecodeOptionalDType("output_dtype", request.output_dtype());
  if (!output_dtype.ok()) return output_dtype.status();
  call.output_dtype = *output_dtype;
  call.verify = request.verify();
  call.intermediates = request.intermediates();
  return call;
}

void EncodeCall(const NormalizeCall& call, v1::NormalizeRequest& request) {
  EncodeTensor(call.inputs.input, *request.mutable_input());
  EncodeSpec(call.spec, *request.mutable_spec());
  if (call.inputs.gamma) EncodeTensor(*call.inputs.gamma, *request.mutable_gamma());
  if (call.inputs.beta) EncodeTensor(*call.inputs.beta, *request.mutable_beta());
  if (call.inputs.residual) EncodeTensor(*call.inputs.residual, *request.mutable_residual());
  if (call.inputs.gate) EncodeTensor(*call.inputs.gate, *request.mutable_gate());
  if (call.output_dtype) request.set_output_dtype(EncodeDType(*call.output_dtype));
  request.set_verify(call.verify);
  request.set_intermediates(call.intermediates);
}

void EncodeResult(const NormalizeResult& result, v1::NormalizeResponse& response) {
  const NormalizeOutputs& outputs = result.outputs;
  EncodeTensor(outputs.output, *response.mutable_output());
  if (outputs.residual_sum) EncodeTensor(*outputs.residual_sum, *response.mutable_residual_sum());
  if (outputs.inverse_rms) {
    EncodeTensor(*outputs.inverse_rms, *response.mutable_intermediates()->mutable_inverse_rms());
  }
  if (outputs.mean) EncodeTensor(*outputs.mean, *response.mutable_intermediates()->mutable_mean());
  if (result.report) EncodeReport(*result.report, *response.mutable_report());
}

absl::StatusOr<NormalizeResult> DecodeResult(const v1::NormalizeResponse& response,
                                             const std::shared_ptr<const void>& owner) {
  NormalizeResult result;
  auto output = DecodeTensor(response.output(), owner);
  if (!output.ok()) return Under("output", output.status());
  result.outputs.output = *std::move(output);
  const auto& inside = response.intermediates();
  for (const auto& status :
       {DecodeOptionalTensor("residual_sum", response.has_residual_sum(), response.residual_sum(), owner,
                             result.outputs.residual_sum),
        DecodeOptionalTensor("intermediates.inverse_rms", inside.has_inverse_rms(), inside.inverse_rms(), owner,
                             result.outputs.inverse_rms),
        DecodeOptionalTensor("intermediates.mean", inside.has_mean(), inside.mean(), owner, result.outputs.mean)}) {
    if (!status.ok()) return status;
  }
  if (response.has_report()) result.report = DecodeReport(response.report());
  return result;
}

}  // namespace layerd::wire
