// Weights and rows that come with a call, put into the order in which strips.h multiplies them. On ActiveSimd().
//
// Threads: pure functions.
#ifndef LAYERD_LIB_KERNELS_STRIP_FILLING_H_
#define LAYERD_LIB_KERNELS_STRIP_FILLING_H_

#include <cstdint>

#include "lib/kernels/matmul_internal.h"

namespace layerd {

// strip[k][n] = float32(w(n0 + n, k0 + k)) for k < depth and n < 32; columns that w does not have are 0.
void FillStrip(const WeightView& w, int64_t k0, int64_t depth, int64_t n0, float* strip);

// out[k][r] = in[r][k], r < rows, k < cols; the rows of `in` are `in_stride` elements apart, those of `out`
// `out_stride`.
void TransposeFloats(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out, int64_t out_stride);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_STRIP_FILLING_H_
