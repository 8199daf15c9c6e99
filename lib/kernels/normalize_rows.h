// RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016) of the rows of a matrix, in float64 inside and rounded
// once (docs/numerics.md, N3).
//
// For each group of `group_size` consecutive elements of a row (normally the whole row), all in float64:
//   x = input, or x + residual rounded to the input's dtype, which is also stored; with gate first, x := x · silu(gate)
//   RMSNorm:   r = 1/√(mean(x²) + ε),             n = x · r
//   LayerNorm: μ = mean(x), r = 1/√(mean((x−μ)²) + ε), n = (x − μ) · r
//   r = 0 where mean + ε = 0
//   y = n · (γ + gamma_offset) + β, by fma; with gate last, y := y · silu(gate); rounded to the output's dtype once.
// With round_before_gamma and a 16-bit input, n is rounded to the input's dtype before γ; with gate last too, so is
// n·(γ + offset) + β before the gate (Qwen3-Next's gated norm).
//
// Sums go by blocks of 8192 elements; within a block 16 accumulators, element i into number i mod 16, squares and
// centred squares by fma; accumulators are added as a tree (i with i+8, then +4, +2, +1), blocks in order, starting
// from block 0. So the bits are the same on every SIMD target.
//
// Aliasing: output and residual_sum overlap nothing. Pointers are aligned to their element only.
// Threads: pure function; rows may be divided over threads by calling it on ranges.
#ifndef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_H_
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "lib/base/dtype.h"

namespace layerd {

enum class NormKind : uint8_t { kRmsNorm, kLayerNorm };
enum class GatePosition : uint8_t { kNone, kFirst, kLast };

struct NormalizeRowsArgs {
  NormKind kind;
  GatePosition gate_position = GatePosition::kNone;
  bool round_before_gamma = false;
  double epsilon;
  double gamma_offset = 0.0;
  int64_t dim;         // elements of a row
  int64_t group_size;  // divides dim

  DType input_dtype;   // of input, residual, gate and residual_sum
  DType output_dtype;  // of output
  const std::byte* input;
  const std::byte* residual = nullptr;  // null: none
  const std::byte* gate = nullptr;      // null: none
  const float* gamma = nullptr;         // [dim], widened; null: 1, to which gamma_offset is not added
  const float* beta = nullptr;          // [dim], widened; null: none

  std::byte* output;
  std::byte* residual_sum = nullptr;  // written where residual is given; not null then
  float* inverse = nullptr;           // [rows · dim / group_size], r rounded to float32; null: not wanted
  float* mean = nullptr;              // the same of μ; null: not wanted, or RMSNorm
};

// Normalises rows row_begin .. row_end − 1; pointers in `args` are those of row 0.
void NormalizeRows(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_H_
