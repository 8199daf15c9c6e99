// The two implementations of matmul.h that need nothing but the CPU: one in Highway, and its scalar twin with std::fma.
// Both compute a tile, a rectangle of y, on the calling thread, and give the same bits.
//
// -0 and NaN, where the order of matmul.h leaves a choice that hardware would make: the blocks' sums are added to +0,
// so a product that underflows to -0 gives +0; any NaN in y is the quiet NaN 0x7FC00000, since which of two NaNs an FMA
// hands on depends on how the compiler orders its operands.
//
// Threads: any number of them; each uses its own Scratch, at most 32 KiB of it.
#ifndef LAYERD_LIB_KERNELS_MATMUL_OWN_H_
#define LAYERD_LIB_KERNELS_MATMUL_OWN_H_

#include <cstddef>
#include <cstdint>
#include <limits>

#include "lib/kernels/matmul.h"

namespace layerd {

// The length of the blocks of k.
inline constexpr int64_t kMatMulBlock = 256;

// Columns [begin, end) of y = x · W + bias, for `rows` rows; none of rows, end - begin and w.in is 0.
struct MatMulTile {
  const float* x;  // [rows, w.in]
  int64_t rows;
  WeightView w;
  const float* bias;  // [w.out], or null
  float* y;           // [rows, w.out]
  int64_t begin;
  int64_t end;
};

// On ActiveSimd(): by Highway on AVX2 or AVX-512, or by the scalar twin.
void MatMulOwn(const MatMulTile& tile);
// The scalar twin.
void MatMulScalar(const MatMulTile& tile);

// out[k][r] = float32(in[r][k]), r < rows, k < cols; the rows of `in` are `in_stride` elements apart, those of `out`
// `out_stride`. On ActiveSimd(). Used to pack weights and inputs alike.
void TransposeToFloat(DType dtype, const std::byte* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                      int64_t out_stride);

// What y holds for `value`: every NaN is made the same.
inline float OneNan(float value) { return value == value ? value : std::numeric_limits<float>::quiet_NaN(); }

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_MATMUL_OWN_H_
