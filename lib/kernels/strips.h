// The innermost part of the products: sums over one block of k for some rows and one or two strips of weights.
//
// A strip is the part of a panel (panels.h) that belongs to one block of k: up to 256 inputs of 32 outputs.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_KERNELS_STRIPS_H_
#define LAYERD_LIB_KERNELS_STRIPS_H_

#include <cstddef>
#include <cstdint>

#include "lib/base/dtype.h"
#include "lib/kernels/matmul.h"
#include "lib/kernels/panels.h"
#include "lib/kernels/row_blocks.h"

namespace layerd {

// Floats of a strip of 256 inputs.
inline constexpr int64_t kStripFloats = kMatMulBlock * kPanelOutputs;

struct StripSums {
  // The strips, both of `dtype`; without a second one it is null.
  DType dtype;
  const std::byte* strips[2];
  // Which rows of x, in which block.
  const RowBlocks* x;
  int64_t k0;
  int64_t group_begin;
  int64_t group_end;
  // Per strip [rows of the groups][32]: set to +0 + sums in the block k0 = 0, and added to in the others.
  float* y[2];
  // What is read next, to be brought near meanwhile; null: nothing.
  const std::byte* next[2];
  int64_t next_bytes;  // of each
  // 2 · kStripFloats floats, aligned to a cache line; used where weights are not float32.
  float* widened;
};

// y[s][row][n] += Σₖ x[row][k0 + k] · w_s(n, k), on ActiveSimd().
void SumStrips(const StripSums& sums);
// The scalar twin.
void SumStripsScalar(const StripSums& sums);

// widened[k][n] = float32(w(n, k)) of a strip of `dtype`, which is not float32, for k < depth.
void WidenStripScalar(DType dtype, const std::byte* strip, int64_t depth, float* widened);

// y[row][n] = OneNan((y[row][n] + 0) + bias[n]) for n < width, the rows of y being `stride` floats apart; bias may be null.
// (Some of OpenBLAS' kernels give a −0 where the sums of the blocks, added to +0, do not.)
void FinishSums(float* y, int64_t rows, int64_t width, int64_t stride, const float* bias);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_STRIPS_H_
