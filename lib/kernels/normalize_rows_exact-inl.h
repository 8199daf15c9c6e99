// The float64 side of normalize_rows: sums in their fixed order, and the formula in full, one vector after another. For
// any options and any length; where something faster gives the same bits, normalize_rows_fast-inl.h has it.
// Included once per SIMD target, by normalize_rows.cc only.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"
#include "lib/kernels/normalize_rows_internal.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_EXACT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_EXACT_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_EXACT_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_EXACT_INL_H_
#endif

#if !LAYERD_BASELINE_TARGET
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

using D = hn::CappedTag<double, 8>;
using V = hn::Vec<D>;
inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));
inline constexpr int64_t kVectors = kAccumulators / kLanes;
// Everything goes by steps of as many elements as there are accumulators.
inline constexpr int64_t kStep = kAccumulators;

// One element as float64.
HWY_INLINE double Element(const double* x) { return *x; }
HWY_INLINE double Element(const float* x) { return *x; }

// ---- sums -------------------------------------------------------------------------------------------------------

// Adds lane i + half to lane i, for halves down to 1.
HWY_INLINE double SumHalves(hn::Full128<double>, hn::Vec<hn::Full128<double>> v) {
  return hn::GetLane(v) + hn::ExtractLane(v, 1);
}
template <class DV>
HWY_INLINE double SumHalves(DV d, hn::Vec<DV> v) {
  const hn::Half<DV> half;
  return SumHalves(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
}

// SumTree() in vectors.
HWY_INLINE double SumVectors(const V (&sums)[kVectors]) {
  V halves[kVectors / 2];
  for (int64_t a = 0; a < kVectors / 2; ++a) halves[a] = hn::Add(sums[a], sums[a + kVectors / 2]);
  for (int64_t a = 0; a < kVectors / 4; ++a) halves[a] = hn::Add(halves[a], halves[a + kVectors / 4]);
  return SumHalves(D(), halves[0]);
}

// The accumulators of one block.
template <SumTerm kTerm>
struct Accumulators {
  V values[kVectors], squares[kVectors];

  HWY_INLINE void Clear() {
    for (int64_t a = 0; a < kVectors; ++a) values[a] = squares[a] = hn::Zero(D());
  }

  // kStep elements.
  template <class T>
  HWY_INLINE void Add(const T* x, V center) {
    const D d;
    for (int64_t a = 0; a < kVectors; ++a) {
      V value = LoadFloat64(d, x + a * kLanes);
      if (kTerm == SumTerm::kCentred) value = hn::Sub(value, center);
      if (kTerm != SumTerm::kSquare) values[a] = hn::Add(values[a], value);
      squares[a] = hn::MulAdd(value, value, squares[a]);
    }
  }

  // Their sums, after the `count` last elements of the block, less than kStep.
  template <class T>
  HWY_INLINE TermSums Total(const T* last, int64_t count, double center) const {
    const D d;
    if (count == 0) return {SumVectors(values), SumVectors(squares)};
    double all_values[kAccumulators], all_squares[kAccumulators];
    for (int64_t a = 0; a < kVectors; ++a) {
      hn::StoreU(values[a], d, all_values + a * kLanes);
      hn::StoreU(squares[a], d, all_squares + a * kLanes);
    }
    for (int64_t i = 0; i < count; ++i) {
      const double value = Element(last + i) - (kTerm == SumTerm::kCentred ? center : 0.0);
      if (kTerm != SumTerm::kSquare) all_values[i] += value;
      all_squares[i] = std::fma(value, value, all_squares[i]);
    }
    return {SumTree(all_values), SumTree(all_squares)};
  }
};

// The sums of one block's terms.
template <SumTerm kTerm, class T>
HWY_NOINLINE TermSums SumBlock(const T* x, int64_t n, double center) {
  const V centers = hn::Set(D(), center);
  Accumulators<kTerm> sums;
  sums.Clear();
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) sums.Add(x + i, centers);
  return sums.Total(x + i, n - i, center);
}

// ---- the formula ------------------------------------------------------------------------------------------------

// What is done with a group once its statistics are known.
struct Formula {
  double mean;
  double inverse;
  double gamma_offset;
  const float* gamma;  // null: 1
  const float* beta;   // null: none
  DType round_to;      // n is rounded to it before γ, and y before the gate; float32: not rounded

  // The formula from `elements` further on. Null pointers are not moved; nothing reads them.
  Formula From(int64_t elements) const {
    Formula moved = *this;
    if (gamma != nullptr) moved.gamma += elements;
    if (beta != nullptr) moved.beta += elements;
    return moved;
  }
};

inline Formula FormulaOf(const NormalizeRowsArgs& args, const NormalizeGroup& group,
                         const GroupStatistics& statistics) {
  return {.mean = statistics.mean,
          .inverse = statistics.inverse,
          .gamma_offset = GammaOffset(args),
          .gamma = args.gamma == nullptr ? nullptr : args.gamma + group.offset,
          .beta = args.beta == nullptr ? nullptr : args.beta + group.offset,
          .round_to = RoundsBeforeGamma(args) ? args.input_dtype : DType::kFloat32};
}

HWY_INLINE V RoundFloat64To(V value, DType dtype) {
  const D d;
  if (dtype == DType::kFloat32) return value;
  return dtype == DType::kFloat16 ? RoundFloat64(d, value, hwy::float16_t())
                                  : RoundFloat64(d, value, hwy::bfloat16_t());
}

// Writes whole vectors of the output where there is no gate and nothing is rounded before γ; gives how many elements.
template <bool kGamma, bool kBeta, class X, class Out>
HWY_INLINE int64_t ApplyPlainFormula(const Formula& f, const X* x, Out* out, int64_t n) {
  const D d;
  const V mean = hn::Set(d, f.mean), inverse = hn::Set(d, f.inverse), offset = hn::Set(d, f.gamma_offset);
  const float* const gamma = f.gamma;
  const float* const beta = f.beta;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    V y = hn::Mul(hn::Sub(LoadFloat64(d, x + i), mean), inverse);
    const V scale = kGamma ? hn::Add(LoadFloat64(d, gamma + i), offset) : hn::Set(d, 1.0);
    y = kBeta ? hn::MulAdd(y, scale, LoadFloat64(d, beta + i)) : hn::Mul(y, scale);
    StoreFloat64(d, y, out + i);
  }
  return i;
}

// Writes n elements of the output. `gate` is silu of the gate that comes last, or null.
template <class X, class Out>
HWY_NOINLINE void ApplyFormula(const Formula& f, const X* x, const double* gate, Out* out, int64_t n) {
  const D d;
  const V mean = hn::Set(d, f.mean);
  const V inverse = hn::Set(d, f.inverse);
  const V gamma_offset = hn::Set(d, f.gamma_offset);
  const auto step = [&](const X* x_at, const float* gamma, const float* beta, const double* gate_at, Out* to) HWY_ATTR {
    V y = RoundFloat64To(hn::Mul(hn::Sub(LoadFloat64(d, x_at), mean), inverse), f.round_to);
    const V scale = gamma == nullptr ? hn::Set(d, 1.0) : hn::Add(LoadFloat64(d, gamma), gamma_offset);
    y = beta == nullptr ? hn::Mul(y, scale) : hn::MulAdd(y, scale, LoadFloat64(d, beta));
    if (gate_at != nullptr) y = hn::Mul(RoundFloat64To(y, f.round_to), LoadFloat64(d, gate_at));
    StoreFloat64(d, y, to);
  };
  int64_t i = 0;
  if (gate == nullptr && f.round_to == DType::kFloat32) {
    if (f.gamma == nullptr) {
      i = f.beta == nullptr ? ApplyPlainFormula<false, false>(f, x, out, n)
                            : ApplyPlainFormula<false, true>(f, x, out, n);
    } else {
      i = f.beta == nullptr ? ApplyPlainFormula<true, false>(f, x, out, n)
                            : ApplyPlainFormula<true, true>(f, x, out, n);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const Formula at = f.From(i);
    step(x + i, at.gamma, at.beta, gate == nullptr ? nullptr : gate + i, out + i);
  }
  if (i == n) return;
  // The last, partial vector, by way of whole ones.
  X last_x[kLanes] = {};
  float last_gamma[kLanes] = {}, last_beta[kLanes] = {};
  double last_gate[kLanes] = {};
  Out last_out[kLanes];
  const size_t count = static_cast<size_t>(n - i);
  std::memcpy(last_x, x + i, count * sizeof(X));
  if (f.gamma != nullptr) std::memcpy(last_gamma, f.gamma + i, count * sizeof(float));
  if (f.beta != nullptr) std::memcpy(last_beta, f.beta + i, count * sizeof(float));
  if (gate != nullptr) std::memcpy(last_gate, gate + i, count * sizeof(double));
  step(last_x, f.gamma == nullptr ? nullptr : last_gamma, f.beta == nullptr ? nullptr : last_beta,
       gate == nullptr ? nullptr : last_gate, last_out);
  std::memcpy(out + i, last_out, count * sizeof(Out));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // !LAYERD_BASELINE_TARGET

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_EXACT_INL_H_
