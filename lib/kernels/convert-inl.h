// Vectors of float32, float16 and bfloat16 elements, loaded and rounded: what the kernels' Highway code shares.
// Included once per SIMD target, by kernels' .cc files only, after hwy/highway.h.
//
// Narrowing is not done by Highway's DemoteTo, which truncates to bfloat16 and on some targets rounds float16 wrongly.
// From float32 it follows lib/base/dtype.cc line by line; from float64 its twin is in normalize_rows_scalar.cc.

#include <limits>

#include "hwy/highway.h"
#include "lib/kernels/narrow_format.h"

#if defined(LAYERD_LIB_KERNELS_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_CONVERT_INL_H_
#undef LAYERD_LIB_KERNELS_CONVERT_INL_H_
#else
#define LAYERD_LIB_KERNELS_CONVERT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// ---- to float32 -------------------------------------------------------------------------------------------------

template <class DF>
HWY_INLINE hn::Vec<DF> LoadFloat32(DF df, const float* from) {
  return hn::LoadU(df, from);
}

template <class DF>
HWY_INLINE hn::Vec<DF> LoadFloat32(DF df, const hwy::float16_t* from) {
  return hn::PromoteTo(df, hn::LoadU(hn::Rebind<hwy::float16_t, DF>(), from));
}

template <class DF>
HWY_INLINE hn::Vec<DF> LoadFloat32(DF df, const hwy::bfloat16_t* from) {
  const hn::Rebind<uint16_t, DF> du16;
  const hn::Rebind<uint32_t, DF> du32;
  const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
}

// ---- from float32 -----------------------------------------------------------------------------------------------

// The 16 bits of the narrowed value, each in a uint32 lane.
template <class DF>
HWY_INLINE hn::Vec<hn::Rebind<uint32_t, DF>> NarrowedBits(DF df, hn::Vec<DF> value, hwy::bfloat16_t) {
  const hn::Rebind<uint32_t, DF> du32;
  const auto bits = hn::BitCast(du32, value);
  const auto high = hn::ShiftRight<16>(bits);
  const auto last_kept = hn::And(high, hn::Set(du32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du32, 0x7FFFu)), last_kept));
  const auto nan = hn::Or(high, hn::Set(du32, 0x40u));
  return hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(value)), nan, rounded);
}

template <class DF>
HWY_INLINE hn::Vec<hn::Rebind<uint32_t, DF>> NarrowedBits(DF df, hn::Vec<DF> value, hwy::float16_t) {
  const hn::Rebind<uint32_t, DF> du32;
  const auto bits = hn::BitCast(du32, value);
  const auto magnitude = hn::And(bits, hn::Set(du32, 0x7FFFFFFFu));
  const auto absolute = hn::BitCast(df, magnitude);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 0x8000u));

  const auto rebased = hn::Sub(magnitude, hn::Set(du32, (127u - 15u) << 23));
  const auto last_kept = hn::And(hn::ShiftRight<13>(rebased), hn::Set(du32, 1u));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(rebased, hn::Set(du32, 0xFFFu)), last_kept));
  // Adding 0.5 puts the unit 2⁻²⁴ at the last bit of the sum, which the addition rounds to nearest even.
  const auto shifted = hn::BitCast(du32, hn::Add(absolute, hn::Set(df, 0.5f)));
  const auto denormal = hn::Sub(shifted, hn::Set(du32, 0x3F000000u));
  const auto nan = hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du32, 0x1FFu)), hn::Set(du32, 0x7E00u));

  auto result = hn::IfThenElse(hn::RebindMask(du32, hn::Lt(absolute, hn::Set(df, 0x1p-14f))), denormal, normal);
  result =
      hn::IfThenElse(hn::RebindMask(du32, hn::Ge(absolute, hn::Set(df, 65520.0f))), hn::Set(du32, 0x7C00u), result);
  result = hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(value)), nan, result);
  return hn::Or(result, sign);
}

template <class DF>
HWY_INLINE void StoreFloat32(DF df, hn::Vec<DF> value, float* to) {
  hn::StoreU(value, df, to);
}

template <class DF, class T16>
HWY_INLINE void StoreFloat32(DF df, hn::Vec<DF> value, T16* to) {
  const hn::Rebind<int32_t, DF> di32;
  const hn::Rebind<uint16_t, DF> du16;
  // DemoteTo saturates, but no lane is above 0xFFFF.
  const auto bits = hn::BitCast(di32, NarrowedBits(df, value, T16()));
  hn::StoreU(hn::DemoteTo(du16, bits), du16, reinterpret_cast<uint16_t*>(to));
}

// Which of two NaNs an operation passes on depends on the order of its operands, which is the compiler's to choose. For
// the same bits on every target, results of arithmetic that are NaN become the one positive quiet NaN.
template <class DF>
HWY_INLINE hn::Vec<DF> WithOneNan(DF df, hn::Vec<DF> value) {
  return hn::IfThenElse(hn::IsNaN(value), hn::BitCast(df, hn::Set(hn::Rebind<uint32_t, DF>(), 0x7FC00000u)), value);
}

// ---- float64 ----------------------------------------------------------------------------------------------------

template <class D, class T>
HWY_INLINE hn::Vec<D> LoadFloat64(D d, const T* from) {
  return hn::PromoteTo(d, LoadFloat32(hn::Rebind<float, D>(), from));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadFloat64(D d, const double* from) {
  return hn::LoadU(d, from);
}

// `value` rounded to the element type once and stored, every NaN as the one positive quiet NaN.
template <class D>
HWY_INLINE void StoreFloat64(D d, hn::Vec<D> value, double* to) {
  const auto nan = hn::Set(d, std::numeric_limits<double>::quiet_NaN());
  hn::StoreU(hn::IfThenElse(hn::IsNaN(value), nan, value), d, to);
}

template <class D>
HWY_INLINE void StoreFloat64(D d, hn::Vec<D> value, float* to) {
  const hn::Rebind<float, D> df;
  hn::StoreU(WithOneNan(df, hn::DemoteTo(df, value)), df, to);
}

constexpr DType DTypeOf(hwy::float16_t) { return DType::kFloat16; }
constexpr DType DTypeOf(hwy::bfloat16_t) { return DType::kBFloat16; }

// |value| rounded to T16 at once: `base` is the power of two at which float64's last place is the last place that T16
// has at |value|, so that adding it rounds to T16's grid, to nearest even. |value| is held at the power of two past
// T16's largest value; counted in T16's places that gives just the pattern of infinity.
template <class D>
struct RoundedMagnitude {
  hn::Vec<D> scale;  // the power of two at or below |value|, not less than T16's least normal value
  hn::Vec<D> base;
  hn::Vec<D> sum;
};

template <class D, class T16>
HWY_INLINE RoundedMagnitude<D> RoundMagnitude(D d, hn::Vec<D> value, T16) {
  constexpr NarrowFormat kFormat = NarrowFormatOf(DTypeOf(T16()));
  const hn::Rebind<uint64_t, D> du64;
  const auto magnitude = hn::Min(hn::Abs(value), hn::Set(d, kFormat.beyond));
  const auto exponent = hn::BitCast(d, hn::And(hn::BitCast(du64, magnitude), hn::Set(du64, kFloat64Exponent)));
  const auto scale = hn::Max(exponent, hn::Set(d, kFormat.least_normal));
  const auto base = hn::Mul(scale, hn::Set(d, kFormat.base_over_scale));
  return {scale, base, hn::Add(magnitude, base)};
}

template <class D, class T16>
HWY_INLINE void StoreFloat64(D d, hn::Vec<D> value, T16* to) {
  constexpr NarrowFormat kFormat = NarrowFormatOf(DTypeOf(T16()));
  const hn::Rebind<uint64_t, D> du64;
  const hn::Rebind<uint16_t, D> du16;
  const auto rounded = RoundMagnitude(d, value, T16());
  const auto units = hn::Sub(hn::BitCast(du64, rounded.sum), hn::BitCast(du64, rounded.base));
  const auto above_least =
      hn::Sub(hn::BitCast(du64, rounded.scale), hn::BitCast(du64, hn::Set(d, kFormat.least_normal)));
  const auto magnitude = hn::Add(units, hn::ShiftRight<kFormat.dropped_bits>(above_least));
  const auto sign = hn::And(hn::ShiftRight<48>(hn::BitCast(du64, value)), hn::Set(du64, uint64_t{0x8000}));
  const auto bits = hn::IfThenElse(hn::RebindMask(du64, hn::IsNaN(value)), hn::Set(du64, uint64_t{kFormat.quiet_nan}),
                                   hn::Or(magnitude, sign));
  hn::StoreU(hn::TruncateTo(du16, bits), du16, reinterpret_cast<uint16_t*>(to));
}

// `value` rounded to T16, as float64.
template <class D, class T16>
HWY_INLINE hn::Vec<D> RoundFloat64(D d, hn::Vec<D> value, T16 type) {
  constexpr NarrowFormat kFormat = NarrowFormatOf(DTypeOf(T16()));
  const auto rounded = RoundMagnitude(d, value, type);
  auto magnitude = hn::Sub(rounded.sum, rounded.base);
  magnitude = hn::IfThenElse(hn::Ge(magnitude, hn::Set(d, kFormat.beyond)),
                             hn::Set(d, std::numeric_limits<double>::infinity()), magnitude);
  return hn::IfThenElse(hn::IsNaN(value), value, hn::CopySignToAbs(magnitude, value));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#endif  // LAYERD_LIB_KERNELS_CONVERT_INL_H_
