#include "lib/layers/feed_forward.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/layers/check_dtype.h"
#include "lib/layers/feed_forward_operands.h"
#include "lib/layers/normalize.h"
#include "lib/layers/widened.h"

namespace layerd {
namespace {

absl::Status CheckGiven(std::string_view field, const std::optional<Tensor>& tensor, bool wanted,
                        std::string_view why) {
  const std::string path = absl::StrCat("weights.", std::string(field));
  if (wanted && !tensor) return MissingField(path, absl::StrCat("expected a tensor, since ", std::string(why)));
  if (!wanted && tensor) {
    return InvalidField(path, "UNEXPECTED_FIELD", absl::StrCat("expected nothing, since ", std::string(why)));
  }
  return absl::OkStatus();
}

// A matrix of `out` × `in`; −1 for a size that this matrix itself decides.
absl::Status CheckMatrix(std::string_view field, const Tensor& matrix, WeightLayout layout, int64_t in, int64_t out,
                         std::string_view in_name, std::string_view out_name) {
  const bool out_in = layout == WeightLayout::kOutIn;
  const bool fits = matrix.rank() == 2 && (in < 0 || matrix.dim(out_in ? 1 : 0) == in) &&
                    (out < 0 || matrix.dim(out_in ? 0 : 1) == out) && matrix.dim(0) > 0 && matrix.dim(1) > 0;
  const std::string path = absl::StrCat("weights.", std::string(field));
  if (fits) return absl::OkStatus();
  const auto size = [](int64_t n, std::string_view name) {
    return n < 0 ? std::string(name) : absl::StrCat(std::string(name), " = ", n);
  };
  const std::string expected_in = size(in, in_name), expected_out = size(out, out_name);
  return InvalidField(
      absl::StrCat(path, ".shape"), "SHAPE_MISMATCH",
      absl::StrCat("expected [", out_in ? expected_out : expected_in, ", ", out_in ? expected_in : expected_out,
                   "] for layout ", out_in ? "OUT_IN" : "IN_OUT", ", got ", ToString(matrix.shape())));
}

// The scales of an int8 matrix, which are there exactly where one is. `matrix` has passed CheckMatrix().
absl::Status CheckScale(std::string_view name, const std::optional<Tensor>& matrix, const std::optional<Tensor>& scale,
                        WeightLayout layout) {
  const std::string path = absl::StrCat("weights.", std::string(name)), scale_path = absl::StrCat(path, "_scale");
  if (!matrix || matrix->dtype() != DType::kInt8) {
    if (!scale) return absl::OkStatus();
    const std::string why =
        matrix ? absl::StrCat(path, " is ", std::string(Name(matrix->dtype()))) : absl::StrCat("there is no ", path);
    return InvalidField(scale_path, "UNEXPECTED_FIELD", absl::StrCat("expected nothing, since ", why));
  }
  if (layout != WeightLayout::kOutIn) {
    return InvalidField(absl::StrCat(path, ".dtype"), "DTYPE_MISMATCH",
                        "expected float32, float16 or bfloat16 for layout IN_OUT, got int8, which OUT_IN alone has");
  }
  const Shape shape = {matrix->dim(0), (matrix->dim(1) + kScaleBlock - 1) / kScaleBlock};
  if (!scale) {
    return MissingField(scale_path, absl::StrCat("expected scales, float16 ", ToString(shape), ", since ", path,
                                                 " is int8, got nothing"));
  }
  if (scale->dtype() != DType::kFloat16) {
    return InvalidField(absl::StrCat(scale_path, ".dtype"), "DTYPE_MISMATCH",
                        absl::StrCat("expected float16, got ", std::string(Name(scale->dtype()))));
  }
  if (scale->shape() != shape) {
    return InvalidField(absl::StrCat(scale_path, ".shape"), "SHAPE_MISMATCH",
                        absl::StrCat("expected ", ToString(shape), ", one for each ", kScaleBlock, " inputs of ", path,
                                     " ", ToString(matrix->shape()), ", got ", ToString(scale->shape())));
  }
  return absl::OkStatus();
}

absl::Status CheckVector(std::string_view field, const std::optional<Tensor>& vector, int64_t size,
                         std::string_view size_name) {
  if (!vector || vector->shape() == Shape{size}) {
    return CheckFloat(absl::StrCat("weights.", std::string(field)), vector);
  }
  return InvalidField(
      absl::StrCat("weights.", std::string(field), ".shape"), "SHAPE_MISMATCH",
      absl::StrCat("expected [", std::string(size_name), " = ", size, "], got ", ToString(vector->shape())));
}

// Limits and the offset are float32 inside: what does not survive the narrowing is refused, not computed with.
absl::Status CheckPositive(std::string_view field, std::optional<double> value) {
  if (!value) return absl::OkStatus();
  const float narrow = static_cast<float>(*value);
  if (narrow > 0 && std::isfinite(narrow)) return absl::OkStatus();
  return InvalidField(field, "OUT_OF_RANGE", absl::StrCat("expected a finite float32 above 0, got ", *value));
}

absl::Status CheckSpec(const FeedForwardSpec& spec) {
  for (const auto& status :
       {CheckPositive("spec.gate_max", spec.gate_max), CheckPositive("spec.up_limit", spec.up_limit),
        CheckEpsilon("spec.inner_norm.epsilon", spec.inner_norm ? spec.inner_norm->epsilon : std::nullopt)}) {
    if (!status.ok()) return status;
  }
  if (!std::isfinite(static_cast<float>(spec.up_offset))) {
    return InvalidField("spec.up_offset", "OUT_OF_RANGE",
                        absl::StrCat("expected a finite float32, got ", spec.up_offset));
  }
  if (!std::isfinite(spec.activation.beta)) {
    return InvalidField("spec.swish_beta", "OUT_OF_RANGE",
                        absl::StrCat("expected a finite number, got ", spec.activation.beta));
  }
  if (spec.activation.kind != Activation::kSilu && spec.activation.beta != 1) {
    return InvalidField("spec.swish_beta", "UNEXPECTED_FIELD",
                        absl::StrCat("expected nothing, since the activation is not SILU, got ", spec.activation.beta));
  }
  if (spec.form == FeedForwardForm::kPlain) {
    if (spec.packing != GateUpPacking::kSeparate) {
      return InvalidField("spec.packing", "UNEXPECTED_FIELD", "expected nothing, since the plain form has no gate");
    }
    const char* field = spec.gate_max         ? "gate_max"
                        : spec.up_limit       ? "up_limit"
                        : spec.up_offset != 0 ? "up_offset"
                                              : "";
    if (*field != '\0') {
      return InvalidField(absl::StrCat("spec.", field), "UNEXPECTED_FIELD",
                          "expected nothing, since the plain form has no gate");
    }
  }
  return absl::OkStatus();
}

Shape WithLast(Shape shape, int64_t last) {
  shape.back() = last;
  return shape;
}

}  // namespace

absl::StatusOr<FeedForwardExtent> CheckFeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights,
                                                   const Tensor& input) {
  if (auto status = CheckSpec(spec); !status.ok()) return status;
  if (auto status = CheckFloat("input.dtype", input.dtype()); !status.ok()) return status;
  if (input.rank() == 0 || input.shape().back() == 0) {
    return InvalidField(
        "input.shape", "EMPTY_ROW",
        absl::StrCat("expected [..., d] with a last dimension of 1 or more, got ", ToString(input.shape())));
  }
  const bool gated = spec.form == FeedForwardForm::kGated;
  const bool separate = gated && spec.packing == GateUpPacking::kSeparate;
  const bool packed = gated && !separate;
  const char* why = separate ? "the form is GATED and the packing SEPARATE"
                    : packed ? "the form is GATED and the packing HALVES or INTERLEAVED"
                             : "the form is PLAIN";
  for (const auto& status :
       {CheckGiven("gate", weights.gate, separate, why), CheckGiven("up", weights.up, !packed, why),
        CheckGiven("gate_up", weights.gate_up, packed, why), CheckGiven("down", weights.down, true, "it is required"),
        weights.gate_bias ? CheckGiven("gate_bias", weights.gate_bias, separate, why) : absl::OkStatus(),
        weights.up_bias ? CheckGiven("up_bias", weights.up_bias, !packed, why) : absl::OkStatus(),
        weights.gate_up_bias ? CheckGiven("gate_up_bias", weights.gate_up_bias, packed, why) : absl::OkStatus(),
        weights.inner_norm_gamma && !spec.inner_norm
            ? CheckGiven("inner_norm_gamma", weights.inner_norm_gamma, false, "spec.inner_norm is not set")
            : absl::OkStatus()}) {
    if (!status.ok()) return status;
  }

  const int64_t dim = input.shape().back();
  const bool out_in = spec.layout == WeightLayout::kOutIn;
  const Tensor& first = separate ? *weights.gate : packed ? *weights.gate_up : *weights.up;
  const char* first_name = separate ? "gate" : packed ? "gate_up" : "up";
  if (auto status = CheckMatrix(first_name, first, spec.layout, dim, -1, "d", packed ? "2h" : "h"); !status.ok()) {
    return status;
  }
  int64_t hidden_dim = first.dim(out_in ? 0 : 1);
  if (packed) {
    if (hidden_dim % 2 != 0) {
      return InvalidField("weights.gate_up.shape", "SHAPE_MISMATCH",
                          absl::StrCat("expected an even number of outputs, 2h, got ", ToString(first.shape())));
    }
    hidden_dim /= 2;
  }
  if (separate) {
    if (auto status = CheckMatrix("up", *weights.up, spec.layout, dim, hidden_dim, "d", "h of weights.gate");
        !status.ok()) {
      return status;
    }
  }
  const std::string h_name = absl::StrCat("h of weights.", first_name);
  if (auto status = CheckMatrix("down", *weights.down, spec.layout, hidden_dim, -1, h_name, "d_out"); !status.ok()) {
    return status;
  }
  const int64_t out_dim = weights.down->dim(out_in ? 0 : 1);
  for (const auto& status : {CheckScale("gate", weights.gate, weights.gate_scale, spec.layout),
                             CheckScale("up", weights.up, weights.up_scale, spec.layout),
                             CheckScale("gate_up", weights.gate_up, weights.gate_up_scale, spec.layout),
                             CheckScale("down", weights.down, weights.down_scale, spec.layout),
                             CheckVector("gate_bias", weights.gate_bias, hidden_dim, "h"),
                             CheckVector("up_bias", weights.up_bias, hidden_dim, "h"),
                             CheckVector("gate_up_bias", weights.gate_up_bias, 2 * hidden_dim, "2h"),
                             CheckVector("down_bias", weights.down_bias, out_dim, "d_out"),
                             CheckVector("inner_norm_gamma", weights.inner_norm_gamma, hidden_dim, "h")}) {
    if (!status.ok()) return status;
  }
  // What is answered must be a legal shape too.
  for (const int64_t width : {out_dim, hidden_dim}) {
    if (auto elements = NumElements(WithLast(input.shape(), width)); !elements.ok()) {
      return Under("input.shape", elements.status());
    }
  }
  return FeedForwardExtent{input.num_elements() / dim, dim, hidden_dim, out_dim};
}

absl::StatusOr<FeedForwardOutputs> FeedForward(const Arena& arena, const FeedForwardSpec& spec,
                                               const FeedForwardWeights& weights, const Tensor& input,
                                               std::optional<DType> output_dtype, bool intermediates,
                                               const StillWanted& still_wanted, const MemoryPlace* place) {
  const auto extent = CheckFeedForward(spec, weights, input);
  if (!extent.ok()) return extent.status();
  const GateUpBiases biases(spec, weights);
  const Widened down_bias(weights.down_bias), inner_norm_gamma(weights.inner_norm_gamma);
  FeedForwardOperands operands = {.inner_norm_gamma = inner_norm_gamma.data()};
  if (spec.form == FeedForwardForm::kGated) {
    operands.gate = {.view = GateViewOf(spec, weights), .bias = biases.gate()};
  }
  operands.up = {.view = UpViewOf(spec, weights), .bias = biases.up()};
  operands.down = {.view = DownViewOf(spec, weights), .bias = down_bias.data()};
  return ComputeFeedForward(arena, spec, *extent, operands, input, output_dtype, intermediates, still_wanted, place);
}

double FeedForwardFlops(const FeedForwardSpec& spec, const FeedForwardExtent& extent) {
  const double first =
      static_cast<double>(extent.dim) * extent.hidden_dim * (spec.form == FeedForwardForm::kGated ? 2 : 1);
  const double second = static_cast<double>(extent.hidden_dim) * extent.out_dim;
  return 2.0 * static_cast<double>(extent.rows) * (first + second);
}

}  // namespace layerd
