#include "lib/layers/normalize.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/kernels/scratch.h"
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

// Rows of operands that are scattered, so many bytes of each at a time: few enough to find them in a second-level cache
// once they are gathered there.
constexpr int64_t kGatheredBytes = int64_t{256} << 10;
// What is worth another thread: more than for rows in one piece, since what is scattered comes off the wire, and a thread
// that looks for more work takes its CPU from those that send and receive.
constexpr int64_t kShareBytes = int64_t{1} << 20;

bool IsScattered(const NormalizeInputs& inputs) {
  return inputs.input.is_scattered() || (inputs.residual && inputs.residual->is_scattered()) ||
         (inputs.gate && inputs.gate->is_scattered());
}

// What `args` says of rows from `row` on; but for input, residual and gate.
NormalizeRowsArgs FromRow(NormalizeRowsArgs args, int64_t row) {
  const int64_t groups = args.dim / args.group_size;
  args.output += row * args.dim * static_cast<int64_t>(SizeOf(args.output_dtype));
  if (args.residual_sum != nullptr)
    args.residual_sum += row * args.dim * static_cast<int64_t>(SizeOf(args.input_dtype));
  if (args.inverse != nullptr) args.inverse += row * groups;
  if (args.mean != nullptr) args.mean += row * groups;
  return args;
}

// NormalizeRows() for operands that are scattered: each thread takes a few rows as they lie, or gathers them, and
// normalises those.
void NormalizeScattered(const Arena& arena, const NormalizeRowsArgs& args, const NormalizeInputs& inputs,
                        int64_t rows) {
  const int64_t row_bytes = args.dim * static_cast<int64_t>(SizeOf(args.input_dtype));
  const int64_t block_rows = std::max<int64_t>(1, kGatheredBytes / row_bytes);
  const int64_t grain = std::max<int64_t>(1, kShareBytes / (block_rows * row_bytes));
  arena.For((rows + block_rows - 1) / block_rows, grain, [&](int64_t begin, int64_t end) {
    const auto block_bytes = static_cast<size_t>(block_rows * row_bytes);
    const size_t block_floats = (block_bytes + sizeof(float) - 1) / sizeof(float);
    float* scratch = Scratch::OfCall().Get(3 * block_floats);
    for (int64_t row = begin * block_rows; row < std::min(rows, end * block_rows); row += block_rows) {
      const int64_t count = std::min(block_rows, rows - row);
      const auto read = [&](const Tensor& tensor, int64_t place) {
        return tensor.Read(row * args.dim, count * args.dim,
                           reinterpret_cast<std::byte*>(scratch + place * static_cast<int64_t>(block_floats)));
      };
      NormalizeRowsArgs block = FromRow(args, row);
      block.input = read(inputs.input, 0);
      if (inputs.residual) block.residual = read(*inputs.residual, 1);
      if (inputs.gate) block.gate = read(*inputs.gate, 2);
      NormalizeRows(block, 0, count);
    }
  });
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
                                           std::optional<DType> output_dtype, bool intermediates,
                                           const MemoryPlace* place) {
  const auto extent = CheckNormalize(spec, inputs);
  if (!extent.ok()) return extent.status();
  if (auto status = CheckFloat("output_dtype", output_dtype); !status.ok()) return status;
  const Tensor& input = inputs.input;
  const Widened gamma(inputs.gamma);
  const Widened beta(inputs.beta);

  NormalizeOutputs outputs;
  outputs.output = Tensor::AllocateAt(place, output_dtype.value_or(input.dtype()), input.shape());
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
  // Few rows that are long are divided themselves, and so lie in one piece.
  const int64_t row_bytes = extent->dim * static_cast<int64_t>(SizeOf(input.dtype()));
  if (IsScattered(inputs) && row_bytes <= kGatheredBytes) {
    NormalizeScattered(arena, args, inputs, extent->rows);
    return outputs;
  }
  args.input = input.data();
  if (inputs.residual) args.residual = inputs.residual->data();
  if (inputs.gate) args.gate = inputs.gate->data();
  NormalizeRows(arena, args, extent->rows);
  return outputs;
}

}  // namespace layerd
