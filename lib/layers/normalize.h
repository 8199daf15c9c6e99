// The Normalize layer: RMSNorm and LayerNorm in every form that real models use, as independent options.
//
// The formula, its order of operations and its rounding stand in lib/kernels/normalize_rows.h; docs/layers.md tells
// which model uses which options. Numerics: N3, N6.
//
// Threads: pure functions; the work is divided over the arena.
#ifndef LAYERD_LIB_LAYERS_NORMALIZE_H_
#define LAYERD_LIB_LAYERS_NORMALIZE_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "lib/base/parallel.h"
#include "lib/base/tensor.h"
#include "lib/kernels/normalize_rows.h"

namespace layerd {

// Whether n = x·r is rounded to a 16-bit input's dtype before it meets γ (Llama) or not (OLMo2, gpt-oss, Gemma). For
// float32 input both are the same. Must be said where γ meets a 16-bit input.
enum class NormRounding : uint8_t { kUnspecified, kBeforeGamma, kAfterGamma };

struct NormalizeSpec {
  NormKind kind = NormKind::kRmsNorm;
  std::optional<double> epsilon;  // default 1e-6 for RMSNorm, 1e-5 for LayerNorm; 0 is honoured; finite, not negative
  NormRounding rounding = NormRounding::kUnspecified;
  double gamma_offset = 0.0;  // added to γ in float64 (Gemma, Nemotron: 1); needs γ; finite
  int64_t group_size = 0;     // statistics per group of so many elements; 0: over all; must divide them
  GatePosition gate_position = GatePosition::kNone;
  int normalized_axes = 1;  // normalise over the last so many axes together (ONNX: rank − axis)
};

double EpsilonOf(const NormalizeSpec& spec);

// INVALID_ARGUMENT with `field` unless `epsilon` is left out, or finite and not negative.
absl::Status CheckEpsilon(std::string_view field, std::optional<double> epsilon);

struct NormalizeInputs {
  Tensor input;                    // [..., d]; any float dtype
  std::optional<Tensor> gamma;     // the shape of the normalised axes, or their elements flat; any float dtype
  std::optional<Tensor> beta;      // likewise
  std::optional<Tensor> residual;  // dtype and shape of the input
  std::optional<Tensor> gate;      // dtype and shape of the input; given exactly when gate_position is not kNone
};

struct NormalizeOutputs {
  Tensor output;                       // shape of the input
  std::optional<Tensor> residual_sum;  // input + residual, rounded to the input's dtype; where a residual was given
  std::optional<Tensor> inverse_rms;   // r of each row and group, float32; on request
  std::optional<Tensor> mean;          // μ of each row and group, float32; on request, LayerNorm only
};

// Rows, elements of a row and groups of a row that a checked call has.
struct NormalizeExtent {
  int64_t rows;
  int64_t dim;
  int64_t group_size;
};

// INVALID_ARGUMENT with the path of the field ("input.shape", "gamma.shape", "spec.epsilon", …) when spec and inputs do
// not fit each other. Nothing is computed and nothing allocated.
absl::StatusOr<NormalizeExtent> CheckNormalize(const NormalizeSpec& spec, const NormalizeInputs& inputs);

// Computes. Errors: those of CheckNormalize; INVALID_ARGUMENT, field "output_dtype", for one that is no float.
// `output_dtype` left out is the input's. The output is written to `place`, unless that is null: it must have room for it
// and overlap no input.
absl::StatusOr<NormalizeOutputs> Normalize(const Arena& arena, const NormalizeSpec& spec, const NormalizeInputs& inputs,
                                           std::optional<DType> output_dtype, bool intermediates,
                                           const MemoryPlace* place = nullptr);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_NORMALIZE_H_
