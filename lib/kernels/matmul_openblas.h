// The tiles of matmul.h by OpenBLAS, and the test that shows whether it may be used for them.
//
// Threads: any number of them.
#ifndef LAYERD_LIB_KERNELS_MATMUL_OPENBLAS_H_
#define LAYERD_LIB_KERNELS_MATMUL_OPENBLAS_H_

#include <string>

#include "absl/status/status.h"
#include "lib/kernels/matmul.h"
#include "lib/kernels/row_blocks.h"

namespace layerd {

// Rows of a group of x, and columns that a tile is best at: OpenBLAS packs the weights anew for every call, so that many
// rows should share them.
inline constexpr int64_t kOpenBlasRows = 512;
inline constexpr int64_t kOpenBlasCols = 512;

// Columns [begin, end) of y = x · W + bias for one group of x's rows; w is float32 and has step 1. y is the first value,
// its rows `y_stride` apart.
void MatMulOpenBlas(const RowBlocks& x, int64_t group, const WeightView& w, const float* bias, int64_t begin,
                    int64_t end, float* y, int64_t y_stride);

// INTERNAL if MatMulOpenBlas() gets small integer products wrong.
absl::Status CheckOpenBlasProducts();
// Where MatMulOpenBlas() first differs from MatMulScalar(), in words; empty if nowhere.
std::string FindOpenBlasDifference();

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_MATMUL_OPENBLAS_H_
