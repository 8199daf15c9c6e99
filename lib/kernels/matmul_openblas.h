// The tiles of matmul.h by OpenBLAS, and the test that shows whether it may be used for them.
//
// Threads: any number of them; each uses its own Scratch, at most 1.5 MiB of it.
#ifndef LAYERD_LIB_KERNELS_MATMUL_OPENBLAS_H_
#define LAYERD_LIB_KERNELS_MATMUL_OPENBLAS_H_

#include <string>

#include "absl/status/status.h"
#include "lib/kernels/matmul_own.h"

namespace layerd {

// Rows that a tile of MatMulOpenBlas() may have, and columns that it is best at: OpenBLAS packs the weights anew for
// every call, so that many rows should share them. (The scratch is 256 · (rows + columns) floats.)
inline constexpr int64_t kOpenBlasRows = 1024;
inline constexpr int64_t kOpenBlasCols = 512;

// tile.rows must be at most kOpenBlasRows.
void MatMulOpenBlas(const MatMulTile& tile);

// INTERNAL if MatMulOpenBlas() gets small integer products wrong.
absl::Status CheckOpenBlasProducts();
// Where MatMulOpenBlas() first differs from MatMulScalar(), in words; empty if nowhere.
std::string FindOpenBlasDifference();

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_MATMUL_OPENBLAS_H_
