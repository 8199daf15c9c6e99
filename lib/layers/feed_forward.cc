#include "lib/layers/feed_forward.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/kernels/convert.h"
#include "lib/kernels/normalize_rows.h"
#include "lib/layers/normalize.h"
#include "lib/layers/widened.h"

namespace layerd {
namespace {

// Rows are computed in chunks whose hidden values take at most so many floats, so that a small call with a wide layer
// cannot ask for memory out of proportion to its own size.
constexpr int64_t kMaxHiddenFloats = int64_t{1} << 24;

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
  if (fits) return absl::OkStatus();
  const auto size = [](int64_t n, std::string_view name) {
    return n < 0 ? std::string(name) : absl::StrCat(std::string(name), " = ", n);
  };
  const std::string expected_in = size(in, in_name), expected_out = size(out, out_name);
  return InvalidField(
      absl::StrCat("weights.", std::string(field), ".shape"), "SHAPE_MISMATCH",
      absl::StrCat("expected [", out_in ? expected_out : expected_in, ", ", out_in ? expected_in : expected_out,
                   "] for layout ", out_in ? "OUT_IN" : "IN_OUT", ", got ", ToString(matrix.shape())));
}

absl::Status CheckVector(std::string_view field, const std::optional<Tensor>& vector, int64_t size,
                         std::string_view size_name) {
  if (!vector || vector->shape() == Shape{size}) return absl::OkStatus();
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

WeightView ViewOf(const Tensor& matrix, WeightLayout layout) {
  const bool out_in = layout == WeightLayout::kOutIn;
  return {matrix.dtype(), layout, matrix.dim(out_in ? 1 : 0), matrix.dim(out_in ? 0 : 1), matrix.data()};
}

Gating GatingOf(const FeedForwardSpec& spec) {
  Gating gating{spec.activation};
  if (spec.gate_max) gating.gate_max = static_cast<float>(*spec.gate_max);
  if (spec.up_limit) gating.up_limit = static_cast<float>(*spec.up_limit);
  gating.up_offset = static_cast<float>(spec.up_offset);
  return gating;
}

// Rows of gate and up next to each other in one product's rows, taken apart.
void Unpack(GateUpPacking packing, const float* packed, int64_t rows, int64_t hidden_dim, float* gate, float* up) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = packed + row * 2 * hidden_dim;
    float* gate_row = gate + row * hidden_dim;
    float* up_row = up + row * hidden_dim;
    if (packing == GateUpPacking::kHalves) {
      std::copy_n(source, hidden_dim, gate_row);
      std::copy_n(source + hidden_dim, hidden_dim, up_row);
    } else {
      for (int64_t i = 0; i < hidden_dim; ++i) {
        gate_row[i] = source[2 * i];
        up_row[i] = source[2 * i + 1];
      }
    }
  }
}

// Where the values of a chunk of rows go: the tensor that answers them, or scratch that the next chunk uses again.
class Values {
 public:
  Values(std::optional<Tensor>& answered, int64_t chunk_rows, int64_t width) : answered_(answered), width_(width) {
    if (!answered_) scratch_ = Tensor::Allocate(DType::kFloat32, {chunk_rows, width});
  }
  float* At(int64_t first_row) {
    return answered_ ? answered_->mutable_floats() + first_row * width_ : scratch_->mutable_floats();
  }

 private:
  std::optional<Tensor>& answered_;
  std::optional<Tensor> scratch_;
  int64_t width_;
};

Shape WithLast(Shape shape, int64_t last) {
  shape.back() = last;
  return shape;
}

}  // namespace

absl::StatusOr<FeedForwardExtent> CheckFeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights,
                                                   const Tensor& input) {
  if (auto status = CheckSpec(spec); !status.ok()) return status;
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
  for (const auto& status : {CheckVector("gate_bias", weights.gate_bias, hidden_dim, "h"),
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
                                               const StillWanted& still_wanted) {
  const auto extent = CheckFeedForward(spec, weights, input);
  if (!extent.ok()) return extent.status();
  const int64_t rows = extent->rows, dim = extent->dim, hidden_dim = extent->hidden_dim, out_dim = extent->out_dim;
  const bool gated = spec.form == FeedForwardForm::kGated;
  const bool packed = gated && spec.packing != GateUpPacking::kSeparate;

  FeedForwardOutputs outputs;
  outputs.output = Tensor::Allocate(output_dtype.value_or(input.dtype()), WithLast(input.shape(), out_dim));
  if (intermediates) {
    const Shape shape = WithLast(input.shape(), hidden_dim);
    if (gated) outputs.gate = Tensor::Allocate(DType::kFloat32, shape);
    outputs.up = Tensor::Allocate(DType::kFloat32, shape);
    outputs.hidden = Tensor::Allocate(DType::kFloat32, shape);
    if (spec.inner_norm) outputs.normed = Tensor::Allocate(DType::kFloat32, shape);
  }
  if (rows == 0) return outputs;

  const Widened gate_bias(weights.gate_bias), up_bias(weights.up_bias), gate_up_bias(weights.gate_up_bias),
      down_bias(weights.down_bias), inner_norm_gamma(weights.inner_norm_gamma);
  const int64_t chunk_rows = std::clamp<int64_t>(kMaxHiddenFloats / std::max(hidden_dim, out_dim), 1, rows);
  Values gate(outputs.gate, gated ? chunk_rows : 0, hidden_dim);
  Values up(outputs.up, chunk_rows, hidden_dim);
  Values hidden(outputs.hidden, chunk_rows, hidden_dim);
  Values normed(outputs.normed, spec.inner_norm ? chunk_rows : 0, hidden_dim);
  const bool widen = input.dtype() != DType::kFloat32;
  const bool narrow = outputs.output.dtype() != DType::kFloat32;
  Tensor wide_input = Tensor::Allocate(DType::kFloat32, {widen ? chunk_rows : 0, dim});
  Tensor wide_output = Tensor::Allocate(DType::kFloat32, {narrow ? chunk_rows : 0, out_dim});
  Tensor gate_up = Tensor::Allocate(DType::kFloat32, {packed ? chunk_rows : 0, 2 * hidden_dim});
  const Gating gating = GatingOf(spec);
  constexpr int64_t kElementsPerTask = 16384;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / hidden_dim);

  for (int64_t first = 0; first < rows; first += chunk_rows) {
    if (still_wanted) {
      if (auto status = still_wanted(); !status.ok()) return status;
    }
    const int64_t count = std::min(chunk_rows, rows - first);
    const std::byte* input_bytes = input.data() + first * dim * static_cast<int64_t>(SizeOf(input.dtype()));
    const float* x = reinterpret_cast<const float*>(input_bytes);
    if (widen) {
      WidenToFloat(input.dtype(), input_bytes, wide_input.mutable_floats(), count * dim);
      x = wide_input.floats();
    }
    float* gate_rows = gate.At(first);
    float* up_rows = up.At(first);
    float* hidden_rows = hidden.At(first);
    float* down_input = spec.inner_norm ? normed.At(first) : hidden_rows;
    if (packed) {
      MatMul(arena, x, count, ViewOf(*weights.gate_up, spec.layout), gate_up_bias.data(), gate_up.mutable_floats());
    } else {
      if (gated) MatMul(arena, x, count, ViewOf(*weights.gate, spec.layout), gate_bias.data(), gate_rows);
      MatMul(arena, x, count, ViewOf(*weights.up, spec.layout), up_bias.data(), up_rows);
    }
    NormalizeRowsArgs norm{
        .kind = NormKind::kRmsNorm,
        .epsilon = spec.inner_norm ? spec.inner_norm->epsilon.value_or(kDefaultInnerNormEpsilon) : 0.0,
        .dim = hidden_dim,
        .group_size = hidden_dim,
        .input_dtype = DType::kFloat32,
        .output_dtype = DType::kFloat32,
        .input = reinterpret_cast<const std::byte*>(hidden_rows),
        .gamma = inner_norm_gamma.data(),
        .output = reinterpret_cast<std::byte*>(down_input)};
    arena.For(count, grain, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * hidden_dim, n = (end - begin) * hidden_dim;
      if (packed) {
        Unpack(spec.packing, gate_up.floats() + 2 * at, end - begin, hidden_dim, gate_rows + at, up_rows + at);
      }
      if (gated) {
        ApplyGating(gating, gate_rows + at, up_rows + at, hidden_rows + at, n);
      } else {
        ApplyActivation(spec.activation, up_rows + at, hidden_rows + at, n);
      }
      if (spec.inner_norm) NormalizeRows(norm, begin, end);
    });
    float* y = narrow ? wide_output.mutable_floats() : outputs.output.mutable_floats() + first * out_dim;
    MatMul(arena, down_input, count, ViewOf(*weights.down, spec.layout), down_bias.data(), y);
    if (narrow) {
      const int64_t element_bytes = static_cast<int64_t>(SizeOf(outputs.output.dtype()));
      NarrowFromFloat(outputs.output.dtype(), y, outputs.output.mutable_data() + first * out_dim * element_bytes,
                      count * out_dim);
    }
  }
  return outputs;
}

double FeedForwardFlops(const FeedForwardSpec& spec, const FeedForwardExtent& extent) {
  const double first =
      static_cast<double>(extent.dim) * extent.hidden_dim * (spec.form == FeedForwardForm::kGated ? 2 : 1);
  const double second = static_cast<double>(extent.hidden_dim) * extent.out_dim;
  return 2.0 * static_cast<double>(extent.rows) * (first + second);
}

}  // namespace layerd
