// The product of the feed-forward layers: y[m][n] = Σₖ x[m][k] · w(n, k) + bias[n], in one fixed order (N4).
//
// For each block of 256 consecutive k: a sum that starts at 0 and takes fma(x[k], w[k], sum) in order of k, in float32.
// The blocks' sums are added in order to +0. Weights in float16, bfloat16 and int8 are widened exactly first. The bias is added
// last, as one float32 addition. A NaN is always the same one, 0x7FC00000. The bits depend on nothing else: not on the
// other rows, the number of threads, the layout of the weights, or whether OpenBLAS or our own kernel did the work.
//
// OpenBLAS is used for large products where a self-test at start proved that this build of it on this CPU follows the
// order; our own kernels (product.h) do the rest, and everything where a SIMD target was forced.
//
// Threads: InitMatMul() once, before any product; MatMul() from any number of threads.
#ifndef LAYERD_LIB_KERNELS_MATMUL_H_
#define LAYERD_LIB_KERNELS_MATMUL_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "lib/base/dtype.h"
#include "lib/base/parallel.h"

namespace layerd {

// How a weight matrix lies in memory: kInOut is [in, out] (y = x·W), kOutIn is [out, in] (y = x·Wᵀ, PyTorch's
// nn.Linear).
enum class WeightLayout : uint8_t { kInOut, kOutIn };

// Inputs that share a scale in an int8 matrix.
inline constexpr int64_t kScaleBlock = 32;

struct WeightView {
  DType dtype;
  WeightLayout layout;
  int64_t in;   // k runs over it
  int64_t out;  // n runs over it
  const std::byte* data;
  // Where the matrix is part of a larger one: elements from one row in memory to the next (0: the rows are dense), and,
  // of kInOut, from one output to the next within a row.
  int64_t stride = 0;
  int64_t step = 1;
  // Of int8 weights, which are kOutIn: float16 [out, ⌈in/32⌉], one for each 32 inputs of an output; w = scale · q, which
  // float32 holds exactly. From one row to the next: elements (0: dense).
  const std::byte* scale = nullptr;
  int64_t scale_stride = 0;
};

// y is [rows, w.out], x is [rows, w.in], both row-major float32; bias is [w.out] or null. y overlaps nothing. Zero rows
// and zero columns do nothing; w.in = 0 gives the bias.
void MatMul(const Arena& arena, const float* x, int64_t rows, const WeightView& w, const float* bias, float* y);

// What InitMatMul() found.
struct MatMulReport {
  std::string openblas_version;    // "OpenBLAS 0.3.21 …"; empty when the library could not be loaded
  std::string openblas_core;       // the core type it runs with, "SkylakeX"
  std::string openblas_requested;  // the core type asked for: by us, or "… by OPENBLAS_CORETYPE"; or empty
  bool follows_order = false;      // the self-test proved the order above, bit for bit
  bool used = false;               // products go through it
  std::string reason;              // why it is not used; empty when it is
};

// Loads OpenBLAS with one thread of its own and the core type that fits this CPU, and tests it: small integer products
// (M, N, K from 1 to 100) must be exact, and the order is compared with the scalar twin for M and N from 1 to 65, K
// from 1 to 256 and both layouts. INTERNAL when a product is wrong: a library that computes wrongly must not serve.
// `allow_openblas` false leaves OpenBLAS unloaded and uses our own kernel alone.
absl::StatusOr<MatMulReport> InitMatMul(bool allow_openblas);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_MATMUL_H_
