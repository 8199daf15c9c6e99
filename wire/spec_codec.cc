#include "wire/spec_codec.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "wire/enum_codec.h"

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

// Reads an enum that may be left out.
template <typename Message, typename Ours, size_t kRows>
absl::Status DecodeIfSet(std::string_view field, Message value, const std::pair<Message, Ours> (&table)[kRows],
                         const std::string& (*name)(Message), std::optional<Ours>& to) {
  if (static_cast<int>(value) == 0) return absl::OkStatus();
  const auto decoded = DecodeEnum(field, value, table, name);
  if (!decoded.ok()) return decoded.status();
  to = *decoded;
  return absl::OkStatus();
}

// The error for an enum that is required and was left out.
template <typename Message, typename Ours, size_t kRows>
absl::Status Missing(std::string_view field, const std::pair<Message, Ours> (&table)[kRows],
                     const std::string& (*name)(Message)) {
  return DecodeEnum(field, static_cast<Message>(0), table, name).status();
}

}  // namespace

absl::StatusOr<NormalizeSaid> DecodeSaid(const v1::NormalizeSpec& message) {
  NormalizeSaid said;
  for (const auto& status :
       {DecodeIfSet("spec.kind", message.kind(), kKinds, v1::NormKind_Name, said.kind),
        DecodeIfSet("spec.rounding", message.rounding(), kRoundings, v1::NormRounding_Name, said.rounding)}) {
    if (!status.ok()) return status;
  }
  if (message.has_epsilon()) said.epsilon = message.epsilon();
  if (message.gamma_offset() != 0) said.gamma_offset = message.gamma_offset();
  if (message.group_size() != 0) said.group_size = message.group_size();
  if (message.has_gate_position()) {
    const auto position =
        DecodeEnum("spec.gate_position", message.gate_position(), kGatePositions, v1::GatePosition_Name);
    if (!position.ok()) return position.status();
    said.gate_position = *position;
  }
  if (message.has_normalized_axes()) said.normalized_axes = message.normalized_axes();
  return said;
}

absl::StatusOr<NormalizeSpec> DecodeSpec(const v1::NormalizeSpec& message) {
  const auto said = DecodeSaid(message);
  if (!said.ok()) return said.status();
  if (!said->kind) return Missing("spec.kind", kKinds, v1::NormKind_Name);
  NormalizeSpec spec;
  spec.kind = *said->kind;
  spec.epsilon = said->epsilon;
  spec.rounding = said->rounding.value_or(spec.rounding);
  spec.gamma_offset = said->gamma_offset.value_or(spec.gamma_offset);
  spec.group_size = said->group_size.value_or(spec.group_size);
  spec.gate_position = said->gate_position.value_or(spec.gate_position);
  spec.normalized_axes = said->normalized_axes.value_or(spec.normalized_axes);
  return spec;
}

void EncodeSaid(const NormalizeSaid& said, v1::NormalizeSpec& message) {
  if (said.kind) message.set_kind(EncodeEnum(*said.kind, kKinds));
  if (said.epsilon) message.set_epsilon(*said.epsilon);
  if (said.rounding) message.set_rounding(EncodeEnum(*said.rounding, kRoundings));
  if (said.gamma_offset) message.set_gamma_offset(*said.gamma_offset);
  if (said.group_size) message.set_group_size(*said.group_size);
  if (said.gate_position) message.set_gate_position(EncodeEnum(*said.gate_position, kGatePositions));
  if (said.normalized_axes) message.set_normalized_axes(*said.normalized_axes);
}

void EncodeSpec(const NormalizeSpec& spec, v1::NormalizeSpec& message) {
  EncodeSaid({.kind = spec.kind,
              .epsilon = spec.epsilon,
              .rounding = spec.rounding,
              .gamma_offset = spec.gamma_offset,
              .group_size = spec.group_size,
              .gate_position = spec.gate_position,
              .normalized_axes = spec.normalized_axes},
             message);
}

absl::StatusOr<FeedForwardSaid> DecodeSaid(const v1::FeedForwardSpec& message) {
  FeedForwardSaid said;
  for (const auto& status :
       {DecodeIfSet("spec.form", message.form(), kForms, v1::FeedForwardForm_Name, said.form),
        DecodeIfSet("spec.activation", message.activation(), kActivations, v1::Activation_Name, said.activation),
        DecodeIfSet("spec.packing", message.packing(), kPackings, v1::GateUpPacking_Name, said.packing),
        DecodeIfSet("spec.layout", message.layout(), kLayouts, v1::WeightLayout_Name, said.layout)}) {
    if (!status.ok()) return status;
  }
  if (message.has_swish_beta()) said.swish_beta = message.swish_beta();
  if (message.has_gate_max()) said.gate_max = message.gate_max();
  if (message.has_up_limit()) said.up_limit = message.up_limit();
  if (message.up_offset() != 0) said.up_offset = message.up_offset();
  if (message.has_inner_norm()) {
    said.inner_norm.emplace();
    if (message.inner_norm().has_epsilon()) said.inner_norm->epsilon = message.inner_norm().epsilon();
  }
  return said;
}

absl::StatusOr<FeedForwardSpec> DecodeSpec(const v1::FeedForwardSpec& message) {
  if (message.form() == v1::FEED_FORWARD_FORM_PLAIN && message.packing() != v1::GATE_UP_PACKING_UNSPECIFIED) {
    return InvalidField("spec.packing", "UNEXPECTED_FIELD", "expected nothing, since the plain form has no gate");
  }
  const auto said = DecodeSaid(message);
  if (!said.ok()) return said.status();
  if (!said->form) return Missing("spec.form", kForms, v1::FeedForwardForm_Name);
  if (!said->activation) return Missing("spec.activation", kActivations, v1::Activation_Name);
  const bool gated = *said->form == FeedForwardForm::kGated;
  if (said->swish_beta && *said->activation != Activation::kSilu) {
    return InvalidField("spec.swish_beta", "UNEXPECTED_FIELD",
                        absl::StrCat("expected nothing, since spec.activation is ",
                                     v1::Activation_Name(message.activation()), ", got ", *said->swish_beta));
  }
  if (gated && !said->packing) return Missing("spec.packing", kPackings, v1::GateUpPacking_Name);
  if (!said->layout) return Missing("spec.layout", kLayouts, v1::WeightLayout_Name);
  FeedForwardSpec spec;
  spec.form = *said->form;
  spec.activation = {*said->activation, said->swish_beta.value_or(1.0)};
  spec.packing = said->packing.value_or(spec.packing);
  spec.layout = *said->layout;
  spec.gate_max = said->gate_max;
  spec.up_limit = said->up_limit;
  spec.up_offset = said->up_offset.value_or(spec.up_offset);
  spec.inner_norm = said->inner_norm;
  return spec;
}

void EncodeSaid(const FeedForwardSaid& said, v1::FeedForwardSpec& message) {
  if (said.form) message.set_form(EncodeEnum(*said.form, kForms));
  if (said.activation) message.set_activation(EncodeEnum(*said.activation, kActivations));
  if (said.swish_beta) message.set_swish_beta(*said.swish_beta);
  if (said.packing) message.set_packing(EncodeEnum(*said.packing, kPackings));
  if (said.layout) message.set_layout(EncodeEnum(*said.layout, kLayouts));
  if (said.gate_max) message.set_gate_max(*said.gate_max);
  if (said.up_limit) message.set_up_limit(*said.up_limit);
  if (said.up_offset) message.set_up_offset(*said.up_offset);
  if (said.inner_norm) {
    auto* inner = message.mutable_inner_norm();
    if (said.inner_norm->epsilon) inner->set_epsilon(*said.inner_norm->epsilon);
  }
}

void EncodeSpec(const FeedForwardSpec& spec, v1::FeedForwardSpec& message) {
  FeedForwardSaid said{.form = spec.form,
                       .activation = spec.activation.kind,
                       .layout = spec.layout,
                       .gate_max = spec.gate_max,
                       .up_limit = spec.up_limit,
                       .up_offset = spec.up_offset,
                       .inner_norm = spec.inner_norm};
  if (spec.activation.kind == Activation::kSilu || spec.activation.beta != 1) said.swish_beta = spec.activation.beta;
  if (spec.form == FeedForwardForm::kGated || spec.packing != GateUpPacking::kSeparate) said.packing = spec.packing;
  EncodeSaid(said, message);
}

}  // namespace layerd::wire
