#include "wire/feed_forward_codec.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "wire/enum_codec.h"
#include "wire/report_codec.h"
#include "wire/tensor_codec.h"

namespace layerd::wire {
namespace {

constexpr std::pair<v1::FeedForwardForm, FeedForwardForm> kForms[] = {
    {v1::FEED_FORWARD_FORM_GATED, FeedForwardForm::kGated},
    {v1::FEED_FORWARD_FORM_PLAIN, FeedForwardForm::kPlain},
};
constexpr std::pair<v1::Activation, Activation> kActivations[] = {
    {v1::ACTIVATION_IDENTITY, Activation::kIdentity},
    {v1::ACTIVATION_SIGMOID, Activation::kSigmoid},
    {v1::ACTIVATION_RELU, Activation::kRelu},
    {v1::ACTIVATION_RELU_SQUARED, Activation::kReluSquared},
    {v1::ACTIVATION_GELU, Activation::kGelu},
    {v1::ACTIVATION_GELU_TANH, Activation::kGeluTanh},
    {v1::ACTIVATION_QUICK_GELU, Activation::kQuickGelu},
    {v1::ACTIVATION_SILU, Activation::kSilu},
};
constexpr std::pair<v1::GateUpPacking, GateUpPacking> kPackings[] = {
    {v1::GATE_UP_PACKING_SEPARATE, GateUpPacking::kSeparate},
    {v1::GATE_UP_PACKING_HALVES, GateUpPacking::kHalves},
    {v1::GATE_UP_PACKING_INTERLEAVED, GateUpPacking::kInterleaved},
};
constexpr std::pair<v1::WeightLayout, WeightLayout> kLayouts[] = {
    {v1::WEIGHT_LAYOUT_IN_OUT, WeightLayout::kInOut},
    {v1::WEIGHT_LAYOUT_OUT_IN, WeightLayout::kOutIn},
};

absl::StatusOr<FeedForwardSpec> DecodeSpec(const v1::FeedForwardSpec& message) {
  FeedForwardSpec spec;
  const auto form = DecodeEnum("spec.form", message.form(), kForms, v1::FeedForwardForm_Name);
  if (!form.ok()) return form.status();
  spec.form = *form;
  const auto activation = DecodeEnum("spec.activation", message.activation(), kActivations, v1::Activation_Name);
  if (!activation.ok()) return activation.status();
  spec.activation.kind = *activation;
  if (message.has_swish_beta()) {
    if (spec.activation.kind != Activation::kSilu) {
      return InvalidField("spec.swish_beta", "UNEXPECTED_FIELD",
                          absl::StrCat("expected nothing, since spec.activation is ",
                                       v1::Activation_Name(message.activation()), ", got ", message.swish_beta()));
    }
    spec.activation.beta = message.swish_beta();
  }
  if (spec.form == FeedForwardForm::kGated) {
    const auto packing = DecodeEnum("spec.packing", message.packing(), kPackings, v1::GateUpPacking_Name);
    if (!packing.ok()) return packing.status();
    spec.packing = *packing;
  } else if (message.packing() != v1::GATE_UP_PACKING_UNSPECIFIED) {
    return InvalidField("spec.packing", "UNEXPECTED_FIELD", "expected nothing, since the plain form has no gate");
  }
  const auto layout = DecodeEnum("spec.layout", message.layout(), kLayouts, v1::WeightLayout_Name);
  if (!layout.ok()) return layout.status();
  spec.layout = *layout;
  if (message.has_gate_max()) spec.gate_max = message.gate_max();
  if (message.has_up_limit()) spec.up_limit = message.up_limit();
  spec.up_offset = message.up_offset();
  if (message.has_inner_norm()) {
    spec.inner_norm.emplace();
    if (message.inner_norm().has_epsilon()) spec.inner_norm->epsilon = message.inner_norm().epsilon();
  }
  return spec;
}

void EncodeSpec(const FeedForwardSpec& spec, v1::FeedForwardSpec& message) {
  message.set_form(EncodeEnum(spec.form, kForms));
  message.set_activation(EncodeEnum(spec.activation.kind, kActivations));
  if (spec.activation.kind == Activation::kSilu || spec.activation.beta != 1)
    message.set_swish_beta(spec.activation.beta);
  if (spec.form == FeedForwardForm::kGated || spec.packing != GateUpPacking::kSeparate) {
    message.set_packing(EncodeEnum(spec.packing, kPackings));
  }
  message.set_layout(EncodeEnum(spec.layout, kLayouts));
  if (spec.gate_max) message.set_gate_max(*spec.gate_max);
  if (spec.up_limit) message.set_up_limit(*spec.up_limit);
  message.set_up_offset(spec.up_offset);
  if (spec.inner_norm) {
    auto* inner = message.mutable_inner_norm();
    if (spec.inner_norm->epsilon) inner->set_epsilon(*spec.inner_norm->epsilon);
  }
}

void EncodeOptional(const std::optional<Tensor>& tensor, v1::Tensor* (*field)(v1::FeedForwardWeights&),
                    v1::FeedForwardWeights& message) {
  if (tensor) EncodeTensor(*tensor, *field(message));
}

}  // namespace

absl::StatusOr<FeedForwardCall> DecodeCall(const v1::FeedForwardRequest& request,
                                           const std::shared_ptr<const void>& owner) {
  if (!request.has_input()) return MissingField("input", "expected a tensor, got nothing");
  if (!request.has_spec()) return MissingField("spec", "expected what to compute, got nothing");
  if (!request.has_weights()) return MissingField("weights", "expected the layer's weights, got nothing");
  FeedForwardCall call;
  auto spec = DecodeSpec(request.spec());
  if (!spec.ok()) return spec.status();
  call.spec = *spec;
  auto input = DecodeTensor(request.input(), owner);
  if (!input.ok()) return Under("input", input.status());
  call.input = *std::move(input);
  const v1::FeedForwardWeights& from = request.weights();
  FeedForwardWeights& to = call.weights;
  for (const auto& status :
       {DecodeOptionalTensor("weights.gate", from.has_gate(), from.gate(), owner, to.gate),
        DecodeOptionalTensor("weights.up", from.has_up(), from.up(), owner, to.up),
        DecodeOptionalTensor("weights.gate_up", from.has_gate_up(), from.gate_up(), owner, to.gate_up),
        DecodeOptionalTensor("weights.down", from.has_down(), from.down(), owner, to.down),
        DecodeOptionalTensor("weights.gate_bias", from.has_gate_bias(), from.gate_bias(), owner, to.gate_bias),
        DecodeOptionalTensor("weights.up_bias", from.has_up_bias(), from.up_bias(), owner, to.up_bias),
        DecodeOptionalTensor("weights.gate_up_bias", from.has_gate_up_bias(), from.gate_up_bias(), owner,
                             to.gate_up_bias),
        DecodeOptionalTensor("weights.down_bias", from.has_down_bias(), from.down_bias(), owner, to.down_bias),
        DecodeOptionalTensor("weights.inner_norm_gamma", from.has_inner_norm_gamma(), from.inner_norm_gamma(), owner,
                             to.inner_norm_gamma)}) {
    if (!status.ok()) return status;
  }
  const auto output_dtype = DecodeOptionalDType("output_dtype", request.output_dtype());
  if (!output_dtype.ok()) return output_dtype.status();
  call.output_dtype = *output_dtype;
  call.verify = request.verify();
  call.intermediates = request.intermediates();
  return call;
}

void EncodeCall(const FeedForwardCall& call, v1::FeedForwardRequest& request) {
  EncodeTensor(call.input, *request.mutable_input());
  EncodeSpec(call.spec, *request.mutable_spec());
  v1::FeedForwardWeights& to = *request.mutable_weights();
  using W = v1::FeedForwardWeights;
  EncodeOptional(
      call.weights.gate, [](W& w) { return w.mutable_gate(); }, to);
  EncodeOptional(
      call.weights.up, [](W& w) { return w.mutable_up(); }, to);
  EncodeOptional(
      call.weights.gate_up, [](W& w) { return w.mutable_gate_up(); }, to);
  EncodeOptional(
      call.weights.down, [](W& w) { return w.mutable_down(); }, to);
  EncodeOptional(
      call.weights.gate_bias, [](W& w) { return w.mutable_gate_bias(); }, to);
  EncodeOptional(
      call.weights.up_bias, [](W& w) { return w.mutable_up_bias(); }, to);
  EncodeOptional(
      call.weights.gate_up_bias, [](W& w) { return w.mutable_gate_up_bias(); }, to);
  EncodeOptional(
      call.weights.down_bias, [](W& w) { return w.mutable_down_bias(); }, to);
  EncodeOptional(
      call.weights.inner_norm_gamma, [](W& w) { return w.mutable_inner_norm_gamma(); }, to);
  if (call.output_dtype) request.set_output_dtype(EncodeDType(*call.output_dtype));
  request.set_verify(call.verify);
  request.set_intermediates(call.intermediates);
}

void EncodeResult(const FeedForwardResult& result, v1::FeedForwardResponse& response) {
  const FeedForwardOutputs& outputs = result.outputs;
  EncodeTensor(outputs.output, *response.mutable_output());
  if (outputs.gate) EncodeTensor(*outputs.gate, *response.mutable_intermediates()->mutable_gate());
  if (outputs.up) EncodeTensor(*outputs.up, *response.mutable_intermediates()->mutable_up());
  if (outputs.hidden) EncodeTensor(*outputs.hidden, *response.mutable_intermediates()->mutable_hidden());
  if (outputs.normed) EncodeTensor(*outputs.normed, *response.mutable_intermediates()->mutable_normed());
  if (result.report) EncodeReport(*result.report, *response.mutable_report());
}

absl::StatusOr<FeedForwardResult> DecodeResult(const v1::FeedForwardResponse& response,
                                               const std::shared_ptr<const void>& owner) {
  FeedForwardResult result;
  auto output = DecodeTensor(response.output(), owner);
  if (!output.ok()) return Under("output", output.status());
  result.outputs.output = *std::move(output);
  const auto& inside = response.intermediates();
  FeedForwardOutputs& to = result.outputs;
  for (const auto& status :
       {DecodeOptionalTensor("intermediates.gate", inside.has_gate(), inside.gate(), owner, to.gate),
        DecodeOptionalTensor("intermediates.up", inside.has_up(), inside.up(), owner, to.up),
        DecodeOptionalTensor("intermediates.hidden", inside.has_hidden(), inside.hidden(), owner, to.hidden),
        DecodeOptionalTensor("intermediates.normed", inside.has_normed(), inside.normed(), owner, to.normed)}) {
    if (!status.ok()) return status;
  }
  if (response.has_report()) result.report = DecodeReport(response.report());
  return result;
}

}  // namespace layerd::wire
