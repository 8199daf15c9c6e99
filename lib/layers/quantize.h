// Int8 matrices made of float ones: symmetric, one scale for each output and 32 of its inputs (the shape of Q8_0).
//
//   scale = the least float16 that is at least max|w| / 127 over the block
//   q     = w / scale, rounded to the nearest integer, ties to even; 0 in a block of zeros, whose scale is 0
//
// So |q| ≤ 127 without clamping, and for every weight
//
//   |w − scale · q| ≤ scale / 2 ≤ max|w| · (1 + 2⁻¹⁰) / 254 + 2⁻²⁵
//
// Q8_0 rounds the scale to nearest, and divides by what it was before that. Rounding it up costs 2⁻¹¹ of it at the mean, and
// keeps the bound where scales are so small that float16 has few of them. Where no scale is a denormal, quantising the values
// scale · q gives the same values again.
//
// Threads: pure functions; the work is divided over the arena, and what comes out does not depend on it.
#ifndef LAYERD_LIB_LAYERS_QUANTIZE_H_
#define LAYERD_LIB_LAYERS_QUANTIZE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "lib/base/parallel.h"
#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/layer.h"
#include "lib/layers/quantization.h"

namespace layerd {

// The largest weight that can be quantised: 127 times the largest float16.
inline constexpr float kMaxQuantizedWeight = 127.0f * 65504.0f;

struct QuantizedMatrix {
  Tensor values;  // int8 [out, in]
  Tensor scale;   // float16 [out, ⌈in/32⌉]
  MatrixError error;
};

// `matrix` is float and lies as `layout` says; `role` names it. INVALID_ARGUMENT, field "weights.{role}", for an element
// that is not finite or is above kMaxQuantizedWeight, naming the first one in order of outputs. Throws std::bad_alloc.
absl::StatusOr<QuantizedMatrix> QuantizeMatrix(const Arena& arena, const std::string& role, const Tensor& matrix,
                                               WeightLayout layout);

// Rows by which the error of the output is measured.
struct QuantizationProbe {
  int64_t rows = 16;  // at least 1
  int64_t seed = 1;   // not negative
};

// `layer`, no outline, with every matrix quantised: the layout becomes OUT_IN, all else stays. Its `quantization` says how
// far it is from `layer`, whose content hash is `source_hash`. INVALID_ARGUMENT: as CheckLayer() and above; field
// "weights.{role}.dtype" where a matrix is int8 already. Throws std::bad_alloc.
absl::StatusOr<FeedForwardLayer> Quantize(const Arena& arena, const FeedForwardLayer& layer,
                                          const std::string& source_hash, const QuantizationProbe& probe);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_QUANTIZE_H_
