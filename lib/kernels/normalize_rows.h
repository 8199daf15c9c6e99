// RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016) of the rows of a matrix, in float64 inside and rounded
// once (docs/numerics.md, N3).
//
// For each group of `group_size` consecutive elements of a row (normally the whole row), all in float64:
//   x = input, or x + residual rounded to the input's dtype, which is also stored; with gate first, x := x · silu(gate)
//   RMSNorm:   r = 1/√(mean(x²) + ε),             n = x · r
//   LayerNorm: μ = mean(x), r = 1/√(v + ε),            n = (x − μ) · r
//              v = mean((x − c)²) − m² and μ = c + m, where m = mean(x − c). c is 0 where 16·m² ≤ v then, so that little
//              cancels; else the μ before, up to twice
//   r = 0 where that root is 0. With gate first, a group with mean(x²) + ε < 2⁻⁹⁰⁰ is multiplied by 2⁷⁰⁰ first.
//   y = n · (γ + gamma_offset) + β, by fma; with gate last, y := y · silu(gate); rounded to the output's dtype once.
// With round_before_gamma and a 16-bit input, n is rounded to the input's dtype before γ; with gate last too, so is
// n·(γ + offset) + β before the gate (Qwen3-Next's gated norm).
//
// Sums go by blocks of 8192 elements; within a block 16 accumulators, element i into number i mod 16, squares by fma; accumulators are added as a tree (i with i+8, then +4, +2, +1), blocks in order, starting
// from block 0. So the bits are the same on every SIMD target, and the blocks of a long group can be divided.
//
// Aliasing: output and residual_sum overlap nothing. Pointers are aligned to their element only.
// Memory: each thread keeps scratch of its own from call to call; the steady state allocates nothing.
// Threads: any number at once. What is written is visible to whoever the return of the call is (streaming stores too).
// The sticky floating-point flags of the calling thread are not kept.
#ifndef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_H_
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "lib/base/dtype.h"
#include "lib/base/parallel.h"

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

  bool stream_output = false;  // writes the output past the caches where that can be done; the bits are the same
};

// Whether an output of so many bytes, all rows together, is better streamed. Then its memory is not read before it is
// written, and what else is in the caches stays there; but who reads it next does not find it in them. That pays where it
// would not have stayed in them: with the output read once afterwards, from 4 MiB on with one thread and 16 MiB with two,
// where the second-level caches have 2 MiB for each and the third is shared by many.
constexpr bool IsWorthStreaming(int64_t output_bytes) { return output_bytes >= int64_t{16} << 20; }

// Normalises rows row_begin .. row_end − 1; pointers in `args` are those of row 0.
void NormalizeRows(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end);

// Normalises rows 0 .. rows − 1, divided over `arena`: by rows and groups, or where those are few and long, within them.
// Little work runs on the calling thread.
void NormalizeRows(const Arena& arena, const NormalizeRowsArgs& args, int64_t rows);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_H_
