#include "client/layer_options.h"

#include <CLI/CLI.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/choice_option.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

absl::Status Unexpected(std::string_view option, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(option), ": expected nothing, ", std::string(why)));
}

template <typename T>
absl::Status CheckNotZero(std::string_view option, const std::optional<T>& value) {
  if (!value || *value != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(option), ": expected a number other than 0, which says nothing beside --layer"));
}

}  // namespace

void RegisterOptions(CLI::App& app, NormalizeSaid& said) {
  AddChoice(app, "--kind", said.kind, kNormKindNames, "which norm; a checkpoint may tell");
  app.add_option("--eps", said.epsilon, "epsilon (1e-6 for rms_norm, 1e-5 for layer_norm; a checkpoint may tell)");
  AddChoice(app, "--gate-position", said.gate_position, kGatePositionNames, "where silu(gate) multiplies in (none)");
  AddChoice(app, "--rounding", said.rounding, kNormRoundingNames, "needed where γ meets a 16-bit input");
  app.add_option("--gamma-offset", said.gamma_offset, "added to γ: 1 for Gemma (0)");
  app.add_option("--group-size", said.group_size, "statistics per group of so many elements (0: whole row)");
}

void RegisterOptions(CLI::App& app, FeedForwardSaid& said) {
  AddChoice(app, "--form", said.form, kFeedForwardFormNames, "gated or plain; a checkpoint tells");
  AddChoice(app, "--activation", said.activation, kActivationNames,
            "the activation; a checkpoint's config.json may tell");
  app.add_option("--swish-beta", said.swish_beta, "β of silu (1)");
  AddChoice(app, "--packing", said.packing, kGateUpPackingNames, "how gate and up come; a checkpoint tells");
  AddChoice(app, "--layout", said.layout, kWeightLayoutNames, "axes of the matrices; a checkpoint tells");
  app.add_option("--gate-max", said.gate_max, "upper limit of the gate");
  app.add_option("--up-limit", said.up_limit, "limit of up, both ways");
  app.add_option("--up-offset", said.up_offset, "added to up (0)");
  app.add_flag_callback(
      "--inner-norm",
      [&said] {
        if (!said.inner_norm) said.inner_norm.emplace();
      },
      "RMSNorm before the last product");
  app.add_option_function<double>(
      "--inner-norm-eps", [&said](double epsilon) { said.inner_norm = InnerNorm{epsilon}; }, "its epsilon (1e-6)");
}

bool AnySaid(const NormalizeSaid& said) {
  return said.kind || said.epsilon || said.rounding || said.gamma_offset || said.group_size || said.gate_position ||
         said.normalized_axes;
}

bool AnySaid(const FeedForwardSaid& said) {
  return said.form || said.activation || said.swish_beta || said.packing || said.layout || said.gate_max ||
         said.up_limit || said.up_offset || said.inner_norm;
}

absl::Status PutOver(const NormalizeSaid& said, NormalizeSpec& spec) {
  spec.kind = said.kind.value_or(spec.kind);
  if (said.epsilon) spec.epsilon = said.epsilon;
  spec.rounding = said.rounding.value_or(spec.rounding);
  spec.gamma_offset = said.gamma_offset.value_or(spec.gamma_offset);
  spec.group_size = said.group_size.value_or(spec.group_size);
  spec.gate_position = said.gate_position.value_or(spec.gate_position);
  spec.normalized_axes = said.normalized_axes.value_or(spec.normalized_axes);
  return absl::OkStatus();
}

absl::Status PutOver(const FeedForwardSaid& said, FeedForwardSpec& spec) {
  spec.form = said.form.value_or(spec.form);
  if (said.activation && *said.activation != spec.activation.kind) spec.activation = {*said.activation};
  if (said.swish_beta) {
    if (spec.activation.kind != Activation::kSilu) {
      return Unexpected("--swish-beta", "since the activation is not silu");
    }
    spec.activation.beta = *said.swish_beta;
  }
  if (said.packing && spec.form == FeedForwardForm::kPlain) {
    return Unexpected("--packing", "since the plain form has no gate");
  }
  spec.packing = said.packing.value_or(spec.packing);
  spec.layout = said.layout.value_or(spec.layout);
  if (said.gate_max) spec.gate_max = said.gate_max;
  if (said.up_limit) spec.up_limit = said.up_limit;
  spec.up_offset = said.up_offset.value_or(spec.up_offset);
  if (said.inner_norm) spec.inner_norm = said.inner_norm;
  return absl::OkStatus();
}

absl::Status CheckSayable(const NormalizeSaid& said) {
  if (auto status = CheckNotZero("--gamma-offset", said.gamma_offset); !status.ok()) return status;
  return CheckNotZero("--group-size", said.group_size);
}

absl::Status CheckSayable(const FeedForwardSaid& said) { return CheckNotZero("--up-offset", said.up_offset); }

CheckpointHints HintsOf(const NormalizeSaid& norm, const FeedForwardSaid& feed_forward) {
  return {.activation = feed_forward.activation,
          .norm_kind = norm.kind,
          .norm_epsilon = norm.epsilon,
          .norm_rounding = norm.rounding};
}

absl::Status NeedOption(std::string_view option, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(option), ": needed, since ", std::string(why)));
}

}  // namespace layerd
