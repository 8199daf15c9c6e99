#include "lib/kernels/activation.h"

#include <cstring>
#include <limits>

#include "lib/kernels/activation_constants.h"
#include "lib/kernels/activation_internal.h"
#include "lib/kernels/highway_targets.h"
#include "lib/kernels/simd.h"

// The order of these matters:
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lib/kernels/activation.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

#if LAYERD_BASELINE_TARGET

void GatingVectors(const Gating& gating, const float* gate, const float* up, float* out, int64_t n) {
  ApplyGatingScalar(gating, gate, up, out, n);
}
void ActivateVectors(const ActivationFunction& act, const float* in, double* out, int64_t n) {
  ActivateFloat64Scalar(act, in, out, n);
}

#else

using D = hn::CappedTag<double, 8>;
using V = hn::Vec<D>;

template <size_t kCount>
HWY_INLINE V Polynomial(const double (&highest_first)[kCount], V x) {
  const D d;
  V sum = hn::Set(d, highest_first[0]);
  for (size_t i = 1; i < kCount; ++i) sum = hn::MulAdd(sum, x, hn::Set(d, highest_first[i]));
  return sum;
}

// Comparisons with NaN are false: written as compare and choose (and not as Min and Max), limits let a NaN through.
HWY_INLINE V AtMost(V x, V limit) { return hn::IfThenElse(hn::Gt(x, limit), limit, x); }
HWY_INLINE V AtLeast(V x, V limit) { return hn::IfThenElse(hn::Lt(x, limit), limit, x); }

// e^y for y ≤ 0; activation_constants.h says how.
HWY_INLINE V ExpNonPositive(V y) {
  const D d;
  const hn::Rebind<uint64_t, D> du64;
  y = AtLeast(y, hn::Set(d, kExpLowest));
  const V shifted = hn::MulAdd(y, hn::Set(d, kLog2E), hn::Set(d, kRoundToInteger));
  const V k = hn::Sub(shifted, hn::Set(d, kRoundToInteger));
  V r = hn::NegMulAdd(k, hn::Set(d, kLn2High), y);
  r = hn::NegMulAdd(k, hn::Set(d, kLn2Low), r);
  const auto exponent = hn::Add(hn::BitCast(du64, shifted), hn::Set(du64, static_cast<uint64_t>(kExponentBias)));
  return hn::Mul(Polynomial(kExpPolynomial, r), hn::BitCast(d, hn::ShiftLeft<kMantissaBits>(exponent)));
}

// x·σ(y). Only the exponential of −|y| is taken, so nothing overflows or cancels. At y = −∞ it is the limit, ±0.
HWY_INLINE V TimesSigma(V x, V y) {
  const D d;
  const V one = hn::Set(d, 1.0);
  const V sign_bit = hn::Set(d, -0.0);
  const V z = ExpNonPositive(hn::Or(y, sign_bit));
  const auto at_end = hn::Eq(y, hn::Set(d, -std::numeric_limits<double>::infinity()));
  x = hn::IfThenElse(at_end, hn::And(x, sign_bit), x);
  const V weight = hn::IfThenElse(hn::Lt(y, hn::Zero(d)), z, one);
  return hn::Div(hn::Mul(x, weight), hn::Add(one, z));
}

// x·Φ(x). Φ is taken at −|x|, where it does not cancel; for x ≥ 0 that is at most ½, taken from 1.
HWY_INLINE V TimesPhi(V x) {
  const D d;
  const V one = hn::Set(d, 1.0);
  const V k = hn::Set(d, kMillsK);
  const V t = hn::Abs(x);
  const V e = ExpNonPositive(hn::Mul(hn::Set(d, -0.5), hn::Mul(t, t)));
  const V held = AtMost(t, hn::Set(d, kMillsLargest));
  const V inverse = hn::Div(one, hn::Add(held, k));
  const V mills = hn::Mul(Polynomial(kMillsPolynomial, hn::Mul(hn::Sub(held, k), inverse)), inverse);
  const V tail = hn::Mul(e, mills);
  const auto at_end = hn::Eq(x, hn::Set(d, -std::numeric_limits<double>::infinity()));
  x = hn::IfThenElse(at_end, hn::Set(d, -0.0), x);
  return hn::Mul(x, hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail)));
}

struct Identity {
  HWY_INLINE V operator()(V x) const { return x; }
};
struct Sigmoid {
  HWY_INLINE V operator()(V x) const { return TimesSigma(hn::Set(D(), 1.0), x); }
};
struct Relu {
  HWY_INLINE V operator()(V x) const { return hn::IfThenZeroElse(hn::Le(x, hn::Zero(D())), x); }
};
struct ReluSquared {
  HWY_INLINE V operator()(V x) const { return hn::IfThenZeroElse(hn::Le(x, hn::Zero(D())), hn::Mul(x, x)); }
};
struct Gelu {
  HWY_INLINE V operator()(V x) const { return TimesPhi(x); }
};
struct GeluTanh {
  HWY_INLINE V operator()(V x) const {
    const D d;
    const V slope = hn::MulAdd(hn::Set(d, kGeluTanhCubic), hn::Mul(x, x), hn::Set(d, kGeluTanhLinear));
    return TimesSigma(x, hn::Mul(x, slope));
  }
};
struct Silu {  // quick_gelu too
  double beta;
  HWY_INLINE V operator()(V x) const { return TimesSigma(x, hn::Mul(hn::Set(D(), beta), x)); }
};
struct Half {  // silu with beta = 0, where beta·∞ would be NaN
  HWY_INLINE V operator()(V x) const { return hn::Mul(hn::Set(D(), 0.5), x); }
};

template <class Act, class Out>
void RunGating(const Act& act, const Gating& gating, const float* gate, const float* up, Out* out, int64_t n) {
  const D d;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(d));
  const V gate_max = hn::Set(d, static_cast<double>(gating.gate_max));
  const V up_limit = hn::Set(d, static_cast<double>(gating.up_limit));
  // Adding −0 changes nothing; adding +0 would make a −0 positive.
  const V up_offset = hn::Set(d, gating.up_offset == 0 ? -0.0 : static_cast<double>(gating.up_offset));
  const auto step = [&](const float* g, const float* u, Out* o) HWY_ATTR {
    V result = act(AtMost(LoadFloat64(d, g), gate_max));
    if (u != nullptr) {
      const V held = AtLeast(AtMost(LoadFloat64(d, u), up_limit), hn::Neg(up_limit));
      result = hn::Mul(result, hn::Add(held, up_offset));
    }
    StoreFloat64(d, result, o);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(gate + i, up == nullptr ? nullptr : up + i, out + i);
  if (i < n) {
    float g[kLanes] = {}, u[kLanes] = {};
    Out o[kLanes];
    const size_t bytes = static_cast<size_t>(n - i) * sizeof(float);
    std::memcpy(g, gate + i, bytes);
    if (up != nullptr) std::memcpy(u, up + i, bytes);
    step(g, up == nullptr ? nullptr : u, o);
    std::memcpy(out + i, o, static_cast<size_t>(n - i) * sizeof(Out));
  }
}

template <class Out>
void RunGating(const Gating& gating, const float* gate, const float* up, Out* out, int64_t n) {
  const double beta = gating.activation.beta;
  switch (gating.activation.kind) {
    case Activation::kIdentity:
      return RunGating(Identity(), gating, gate, up, out, n);
    case Activation::kSigmoid:
      return RunGating(Sigmoid(), gating, gate, up, out, n);
    case Activation::kRelu:
      return RunGating(Relu(), gating, gate, up, out, n);
    case Activation::kReluSquared:
      return RunGating(ReluSquared(), gating, gate, up, out, n);
    case Activation::kGelu:
      return RunGating(Gelu(), gating, gate, up, out, n);
    case Activation::kGeluTanh:
      return RunGating(GeluTanh(), gating, gate, up, out, n);
    case Activation::kQuickGelu:
      return RunGating(Silu{kQuickGeluSlope}, gating, gate, up, out, n);
    case Activation::kSilu:
      if (beta == 0) return RunGating(Half(), gating, gate, up, out, n);
      return RunGating(Silu{beta}, gating, gate, up, out, n);
  }
}

void GatingVectors(const Gating& gating, const float* gate, const float* up, float* out, int64_t n) {
  RunGating(gating, gate, up, out, n);
}

void ActivateVectors(const ActivationFunction& act, const float* in, double* out, int64_t n) {
  RunGating({.activation = act}, in, nullptr, out, n);
}

#endif  // LAYERD_BASELINE_TARGET

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd {

HWY_EXPORT(GatingVectors);
HWY_EXPORT(ActivateVectors);

namespace {

// `up` may be null: then only the gate is activated.
void Dispatch(const Gating& gating, const float* gate, const float* up, float* out, int64_t n) {
  if (ActiveSimd() == Simd::kScalar) return ApplyGatingScalar(gating, gate, up, out, n);
  HWY_DYNAMIC_DISPATCH(GatingVectors)(gating, gate, up, out, n);
}

}  // namespace

void ApplyActivation(const ActivationFunction& act, const float* in, float* out, int64_t n) {
  Dispatch({.activation = act}, in, nullptr, out, n);
}

void ApplyGating(const Gating& gating, const float* gate, const float* up, float* out, int64_t n) {
  Dispatch(gating, gate, up, out, n);
}

void ActivateFloat64(const ActivationFunction& act, const float* in, double* out, int64_t n) {
  if (ActiveSimd() == Simd::kScalar) return ActivateFloat64Scalar(act, in, out, n);
  HWY_DYNAMIC_DISPATCH(ActivateVectors)(act, in, out, n);
}

}  // namespace layerd
#endif  // HWY_ONCE
