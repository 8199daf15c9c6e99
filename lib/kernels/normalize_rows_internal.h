// What the SIMD code of normalize_rows and its scalar twin share: the order of summation and the root.
#ifndef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_INTERNAL_H_
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_INTERNAL_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "lib/kernels/normalize_rows.h"

namespace layerd {

inline constexpr int64_t kSumBlock = 8192;
inline constexpr int64_t kAccumulators = 16;

// Adds accumulator i + 8 to i, then i + 4, i + 2, i + 1.
inline double SumTree(double (&a)[kAccumulators]) {
  for (int64_t half = kAccumulators / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) a[i] += a[i + half];
  }
  return a[0];
}

// 1/√(mean + ε), or 0 where that is not defined because mean + ε = 0: an all-zero group stays zero.
inline double InverseRoot(double mean, double epsilon) {
  const double sum = mean + epsilon;
  return sum == 0 ? 0.0 : 1.0 / std::sqrt(sum);
}

// Results that are NaN become the one positive quiet NaN, so that bits do not depend on the order of operands.
inline float ToFloat32WithOneNan(double value) {
  return std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(value);
}

// Where the parts of one group of one row lie.
struct NormalizeGroup {
  int64_t offset;  // of its first element in its row; γ and β start there
  int64_t first;   // of its first element in the matrix
  int64_t index;   // in `inverse` and `mean`
};

inline NormalizeGroup GroupAt(const NormalizeRowsArgs& args, int64_t row, int64_t offset) {
  return {offset, row * args.dim + offset, (row * args.dim + offset) / args.group_size};
}

// Whether n is rounded before γ.
inline bool RoundsBeforeGamma(const NormalizeRowsArgs& args) {
  return args.round_before_gamma && args.input_dtype != DType::kFloat32;
}

inline bool HasGate(const NormalizeRowsArgs& args, GatePosition position) {
  return args.gate != nullptr && args.gate_position == position;
}

// The scalar twin.
void NormalizeRowsScalar(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_INTERNAL_H_
