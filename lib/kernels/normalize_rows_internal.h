// What the SIMD code of normalize_rows and its scalar twin share: the order of summation and the root, and the three
// steps that a target implements.
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

// What is summed: x², x and x², or x − c and (x − c)².
enum class SumTerm : uint8_t { kSquare, kValueAndSquare, kCentred };

struct Terms {
  SumTerm term;
  double center = 0;  // c
  double scale = 1;   // a power of two, by which x is multiplied first; not 1 only where the gate comes first
};

struct TermSums {
  double values = 0;  // 0 where they are not summed
  double squares = 0;

  void Add(const TermSums& other) {
    values += other.values;
    squares += other.squares;
  }
};

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

// Where the parts of one group of one row lie. Groups are counted through all rows; they lie in memory in that order.
struct NormalizeGroup {
  int64_t offset;  // of its first element in its row; γ and β start there
  int64_t first;   // of its first element in the matrix
  int64_t index;   // in `inverse` and `mean`
};

inline NormalizeGroup GroupAt(const NormalizeRowsArgs& args, int64_t index) {
  return {index % (args.dim / args.group_size) * args.group_size, index * args.group_size, index};
}

inline int64_t BlocksOf(const NormalizeRowsArgs& args) { return (args.group_size + kSumBlock - 1) / kSumBlock; }

// Whether n is rounded before γ.
inline bool RoundsBeforeGamma(const NormalizeRowsArgs& args) {
  return args.round_before_gamma && args.input_dtype != DType::kFloat32;
}

inline bool HasGate(const NormalizeRowsArgs& args, GatePosition position) {
  return args.gate != nullptr && args.gate_position == position;
}

// Adding −0 changes nothing; adding +0 would make a −0 positive.
inline double GammaOffset(const NormalizeRowsArgs& args) { return args.gamma_offset == 0 ? -0.0 : args.gamma_offset; }

// The statistics of one group, of x · scale.
struct GroupStatistics {
  double mean = 0;  // 0 for RMSNorm
  double inverse = 0;
  double scale = 1;
};

inline void WriteStatistics(const NormalizeRowsArgs& args, int64_t group, const GroupStatistics& statistics) {
  if (args.kind == NormKind::kLayerNorm && args.mean != nullptr) {
    args.mean[group] = ToFloat32WithOneNan(statistics.mean / statistics.scale);
  }
  if (args.inverse != nullptr) args.inverse[group] = ToFloat32WithOneNan(statistics.inverse * statistics.scale);
}

// What is summed first.
inline SumTerm FirstTerm(NormKind kind) {
  return kind == NormKind::kRmsNorm ? SumTerm::kSquare : SumTerm::kValueAndSquare;
}

// x · silu(gate) may be so small that its square is less than a normal float64. Then all is done with x · 2⁷⁰⁰.
inline constexpr double kLeastMeanSquare = 0x1p-900;
inline constexpr double kScaleOfSmall = 0x1p700;

// The statistics of one group of n elements from the sums of its first term; sum(terms) gives others.
//
// With u = 2⁻⁵³ and k = n/16 + 6, the most additions that any element goes through, a mean m of x − c is wrong by
// k·u·mean|x − c|, and v = mean((x − c)²) − m² by k·u·(mean((x − c)²) + 2·|m|·mean|x − c|): by 1.58·k·u·v where 16·m² ≤ v.
// So with c = 0 (x − μ)·r is wrong by less than 2·k·u·max|x|·r, but for some u of its own: N3's bound. Where the mean is
// larger, it becomes c. That is enough once, unless x is so nearly constant that the rounding of its mean is what is left.
template <class Sum>
GroupStatistics StatisticsOf(const NormalizeRowsArgs& args, TermSums sums, const Sum& sum) {
  const double n = static_cast<double>(args.group_size);
  double scale = 1;
  if (HasGate(args, GatePosition::kFirst) && sums.squares / n + args.epsilon < kLeastMeanSquare) {
    scale = kScaleOfSmall;
    sums = sum(Terms{SumTerm::kCentred, 0.0, scale});
  }
  double mean = 0, variance = sums.squares / n;
  if (args.kind == NormKind::kLayerNorm) {
    constexpr int kMostCentred = 2;
    for (int centred = 0;; ++centred) {
      const double rest = sums.values / n;
      mean += rest;
      variance = std::fma(-rest, rest, sums.squares / n);
      if (16 * rest * rest <= variance) break;
      if (centred == kMostCentred) {  // not a number
        variance = sums.squares / n;
        break;
      }
      sums = sum(Terms{SumTerm::kCentred, mean, scale});
    }
  }
  return {mean, InverseRoot(variance, args.epsilon * scale * scale), scale};
}

// The same where sum(terms) adds up the terms of all blocks in order. The first sum is the one that makes x (adds the
// residual, opens the gate).
template <class Sum>
GroupStatistics StatisticsBy(const NormalizeRowsArgs& args, const Sum& sum) {
  return StatisticsOf(args, sum(Terms{FirstTerm(args.kind)}), sum);
}

// ---- The steps. Each runs on the active SIMD target. ------------------------------------------------------------

// Normalises groups begin .. end − 1.
void NormalizeGroups(const NormalizeRowsArgs& args, int64_t begin, int64_t end);

// For one long group, block by block, so that threads can share it: sums[b − begin] are the sums of block b's terms, for
// b from begin to end − 1. Where a residual is given, sums of the first term write residual_sum and the rest reads it.
void SumBlocks(const NormalizeRowsArgs& args, int64_t group, const Terms& terms, int64_t begin, int64_t end,
               TermSums* sums);
// Writes the output of blocks begin .. end − 1.
void ApplyBlocks(const NormalizeRowsArgs& args, int64_t group, const GroupStatistics& statistics, int64_t begin,
                 int64_t end);

// The scalar twins.
void NormalizeGroupsScalar(const NormalizeRowsArgs& args, int64_t begin, int64_t end);
void SumBlocksScalar(const NormalizeRowsArgs& args, int64_t group, const Terms& terms, int64_t begin, int64_t end,
                     TermSums* sums);
void ApplyBlocksScalar(const NormalizeRowsArgs& args, int64_t group, const GroupStatistics& statistics, int64_t begin,
                       int64_t end);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_INTERNAL_H_
