// What the parts of matmul.h share.
//
// -0 and NaN, where the order of matmul.h leaves a choice that hardware would make: the blocks' sums are added to +0,
// so a product that underflows to -0 gives +0; any NaN in y is the quiet NaN 0x7FC00000, since which of two NaNs an FMA
// hands on depends on how the compiler orders its operands.
#ifndef LAYERD_LIB_KERNELS_MATMUL_INTERNAL_H_
#define LAYERD_LIB_KERNELS_MATMUL_INTERNAL_H_

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
  float* y;           // columns from `begin` on of [rows, w.out]; its rows are y_stride elements apart
  int64_t y_stride;
  int64_t begin;
  int64_t end;
};

// The tile in plain C++ with std::fma, straight from the definition. Threads: any.
void MatMulScalar(const MatMulTile& tile);

// Elements from one row in memory to the next.
inline int64_t RowStride(const WeightView& w) {
  return w.stride != 0 ? w.stride : w.layout == WeightLayout::kOutIn ? w.in : w.out * w.step;
}
inline int64_t ScaleStride(const WeightView& w) {
  return w.scale_stride != 0 ? w.scale_stride : (w.in + kScaleBlock - 1) / kScaleBlock;
}
// w(n, k) as float32.
float WeightAt(const WeightView& w, int64_t n, int64_t k);

// What y holds for `value`: every NaN is made the same.
inline float OneNan(float value) { return value == value ? value : std::numeric_limits<float>::quiet_NaN(); }

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_MATMUL_INTERNAL_H_
