#include "lib/layers/normalize.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/layers/check_dtype.h"
#include "lib/layers/widened.h"

namespace layerd {
namespace {

bool Is16Bit(DType dtype) { return dtype != DType::kFloat32; }

absl::Status CheckLikeInput(std::string_view field, const std::optional<Tensor>& tensor, const Tensor& input) {
  if (!tensor) return absl::OkStatus();
  if (tensor->dtype() != input.dtype()) {
    return InvalidField(absl::StrCat(std::string(field), ".dtype"), "DTYPE_MISMATCH",
                        absl::StrCat("expected the input's dtype ", std::string(Name(input.dtype())), ", got ",
                                     std::string(Name(tensor->dtype()))));
  }
  if (tensor->shape() != input.shape()) {
    return InvalidField(
        absl::StrCat(std::string(field), ".shape"), "SHAPE_MISMATCH",
        absl::StrCat("expected the input's shape ", ToString(input.shape()), ", got ", ToString(tensor->shape())));
  }
  return absl::OkStatus();
}

absl::Status CheckScale(std::string_view field, const std::optional<Tensor>& tensor,
                        absl::Span<const int64_t> normalized_shape, int64_t dim) {
  if (!tensor || tensor->shape() == Shape{dim} || absl::MakeConstSpan(tensor->shape()) == normalized_shape) {
    return absl::OkStatus();
  }
  const std::string flat = normalized_shape.size() > 1 ? absl::StrCat(" or ", ToString({dim})) : "";
  return InvalidField(absl::StrCat(std::string(field), ".shape"), "SHAPE_MISMATCH",
                      absl::StrCat("expected ", ToString(normalized_shape), flat, " to fit input.shape, got ",
                                   ToString(tensor->shape())));
}

}  // namespace

double EpsilonOf(const NormalizeSpec& spec) {
  return spec.epsilon.value_or(spec.kind == NormKind::kRmsNorm ? 1e-6 : 1e-5);
}

absl::Status CheckEpsilon(std::string_view field, std::optional<double> epsilon) {
  if (epsilon && !(*epsilon >= 0 && std::isfinite(*epsilon))) {
    return InvalidField(field, "EPSILON_OUT_OF_RANGE",
                        absl::StrCat("expected a finite number of 0 or more, got ", *epsilon));
  }
  return absl::OkStatus();
}

absl::StatusOr<NormalizeExtent> CheckNormalize(const NormalizeSpec& spec, const NormalizeInputs& inputs) {
  const Tensor& input = inputs.input;
  if (auto status = CheckEpsilon("spec.epsilon", spec.epsilon); !status.ok()) return status;
  if (auto status = CheckFloat("input.dtype", input.dtype()); !status.ok()) return status;
  if (input.rank() == 0) {
    return InvalidField("input.shape", "RANK_TOO_SMALL", "expected at least 1 dimension, got [] (a scalar)");
  }
  if (spec.normalized_axes < 1 || spec.normalized_axes > input.rank()) {
    return InvalidField("spec.normalized_axes", "OUT_OF_RANGE",
                        absl::StrCat("expected 1 to ", input.rank(), " for the input's shape ", ToString(input.shape()),
                                     ", got ", spec.normalized_axes));
  }
  const auto normalized = absl::MakeConstSpan(input.shape()).last(spec.normalized_axes);
  int64_t dim = 1;
  for (const int64_t d : normalized) {
    if (d == 0) {
      return InvalidField("input.shape", "EMPTY_ROW",
                          absl::StrCat("expected normalised dimensions of 1 or more, got ", ToString(input.shape())));
    }
    dim *= d;
  }
  if (spec.group_size < 0 || (spec.group_size > 0 && dim % spec.group_size != 0)) {
    return InvalidField(
        "spec.group_size", "OUT_OF_RANGE",
        absl::StrCat("expected 0 or a divisor of ", dim, ", the normalised elements of a row, got ", spec.group_size));
  }
  for (const auto& status :
       {CheckFloat("gamma", inputs.gamma), CheckFloat("beta", inputs.beta),
        CheckScale("gamma", inputs.gamma, normalized, dim), CheckScale("beta", inputs.beta, normalized, dim),
        CheckLikeInput("residual", inputs.residual, input), CheckLikeInput("gate", inputs.gate, input)}) {
    if (!status.ok()) return status;
  }
  if (inputs.gamma && Is16Bit(input.dtype()) && spec.rounding == NormRounding::kUnspecified) {
    return MissingField("spec.rounding", absl::StrCat("expected BEFORE_GAMMA or AFTER_GAMMA, since gamma meets a ",
                                                      std::string(Name(input.dtype())), " input, got nothing"));
  }
  if (!std::isfinite(spec.gamma_offset)) {
    return InvalidField("spec.gamma_offset", "OUT_OF_RANGE",
                        absl::StrCat("expected a finite number, got ", spec.gamma_offset));
  }
  if (spec.gamma_offset != 0 && !inputs.gamma) {
    return MissingField("gamma", absl::StrCat("expected gamma, since spec.gamma_offset is ", spec.gamma_offset));
  }
  if (spec.gate_position != GatePosition::kNone && !inputs.gate) {
    return MissingField("gate", "expected a gate, since spec.gate_position says where one stands");
  }
  if (spec.gate_position == GatePosition::kNone && inputs.gate) {
    return InvalidField("gate", "UNEXPECTED_FIELD",
                        "expected no gate, since spec.gate_position is NONE; say FIRST or LAST");
  }
  return NormalizeExtent{input.num_elements() / dim, dim, spec.group_size == 0 ? dim : spec.group_size};
}

absl::StatusOr<NormalizeOutputs> Normalize(const Arena& arena, const NormalizeSpec& spec, const NormalizeInputs& inputs,
                                           std::optional<DType> output_dtype, bool intermediates) {
  const auto extent = CheckNormalize(spec, inputs);
  if (!extent.ok()) return extent.status();
  if (auto status = CheckFloat("output_dtype", output_dtype); !status.ok()) return status;
  const Tensor& input = inputs.input;
  const Widened gamma(inputs.gamma);
  const Widened beta(inputs.beta);

  NormalizeOutputs outputs;
  outputs.output = Tensor::Allocate(output_dtype.value_or(input.dtype()), input.shape());
  const int64_t groups = extent->dim / extent->group_size;
  NormalizeRowsArgs args{.kind = spec.kind,
                         .gate_position = spec.gate_position,
                         .round_before_gamma = spec.rounding == NormRounding::kBeforeGamma && Is16Bit(input.dtype()),
                         .epsilon = EpsilonOf(spec),
                         .gamma_offset = spec.gamma_offset,
                         .dim = extent->dim,
                         .group_size = extent->group_size,
                         .input_dtype = input.dtype(),
                         .output_dtype = outputs.output.dtype(),
                         .input = input.data(),
                         .residual = inputs.residual ? inputs.residual->data() : nullptr,
                         .gate = inputs.gate ? inputs.gate->data() : nullptr,
                         .gamma = gamma.data(),
                         .beta = beta.data(),
                         .output = outputs.output.mutable_data(),
                         .stream_output = IsWorthStreaming(static_cast<int64_t>(outputs.output.num_bytes()))};
  if (inputs.residual) {
    outputs.residual_sum = Tensor::Allocate(input.dtype(), input.shape());
    args.residual_sum = outputs.residual_sum->mutable_data();
  }
  if (intermediates) {
    outputs.inverse_rms = Tensor::Allocate(DType::kFloat32, {extent->rows, groups});
    args.inverse = outputs.inverse_rms->mutable_floats();
    if (spec.kind == NormKind::kLayerNorm) {
      outputs.mean = Tensor::Allocate(DType::kFloat32, {extent->rows, groups});
      args.mean = outputs.mean->mutable_floats();
    }
  }
  NormalizeRows(arena, args, extent->rows);
  return outputs;
}

}  // namespace layerd
