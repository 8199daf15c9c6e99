// RMSNorm from float32 to float32 by pairs of float32, on 512-bit vectors; normalize_rows_fast-inl.h has the idea.
// Included once per SIMD target, by normalize_rows.cc only.

#include <immintrin.h>

#include <bit>

#include "hwy/highway.h"
#include "lib/kernels/normalize_rows_fast-inl.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_PAIR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_PAIR_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_PAIR_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_PAIR_INL_H_
#endif

#if HWY_TARGET <= HWY_AVX3  // of x86, and wider
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

// x·γ = q + e exactly, r = h + l exactly with h ≤ r in float32, q·h = v + f exactly: so x·γ·r is v + t with
// t = q·l + e·h + f but for e·l. In units u = 2⁻²⁴·|v|: |e·h| ≤ u, |f| ≤ u, 0 ≤ q·l ≤ 2u, e·l ≤ 2⁻²³·u. The rounding of l
// costs 2⁻²³·u, that of e·h + f 2⁻²³·u, that of t 2⁻²²·u: with e·l, 5·2⁻⁴⁷·|v| in all, and with the exact form's own
// roundings, 2⁻⁵¹·|v|, less than 2⁻⁴⁴·⁶·|v|. As v is a float32, no point at which the rounding of v + t changes is nearer
// to v than 2⁻²⁵·|v|; so there t is right within a part in 2¹⁹, and where v + t·(1 ± 2⁻¹⁹) are the same float32, the exact
// form's value is rounded to it too.
//
// Signs of zero: −t is computed and subtracted. With q = ±0 it is ∓0, and v − (∓0) is v.
//
// All this holds where nothing overflowed or underflowed. The processor's sticky flags tell.
class PairForm : public Form<float> {
 public:
  static constexpr SumTerm kFirstTerm = SumTerm::kSquare;
  static constexpr int kStreamedSideBySide = kMostSideBySide;
  static bool Takes(const GroupStatistics& statistics) { return IsModerate(statistics.inverse); }

  struct Doubt {
    VBits bits;  // not 0 where the two sums were not the same
    HWY_INLINE void Clear() { bits = hn::Zero(DBits()); }
  };
  static void ClearDoubts() { _mm_setcsr(_mm_getcsr() & ~uint32_t{_MM_EXCEPT_MASK}); }
  static bool IsSure(const Doubt& doubt) {
    const uint32_t flags = _mm_getcsr() & (_MM_EXCEPT_INVALID | _MM_EXCEPT_OVERFLOW | _MM_EXCEPT_UNDERFLOW);
    return flags == 0 && hn::AllTrue(DBits(), hn::Eq(doubt.bits, hn::Zero(DBits())));
  }

  HWY_INLINE void Begin(const NormalizeRowsArgs& args, const Weights& weights, const GroupInput& in) {
    Form<float>::Begin(args, in);
    const DW d;
    const double r = in.statistics.inverse;
    const double high = std::bit_cast<double>(std::bit_cast<uint64_t>(r) & ~uint64_t{0x1FFFFFFF});
    high_ = hn::Set(d, static_cast<float>(high));
    low_ = hn::Set(d, static_cast<float>(r - high));
    scale_ = weights.scale_at(in.group.offset);
  }

  HWY_INLINE VW ColumnsAt(int64_t column) const { return hn::LoadU(DW(), scale_ + column); }

  HWY_INLINE FloatPiece Compute(const float* x, VW scale, Doubt& doubt) const {
    const DBits bits;
    const VW x_at = hn::LoadU(DW(), x);
    const VW q = hn::Mul(x_at, scale);
    const VW e = hn::MulSub(x_at, scale, q);
    const VW v = hn::Mul(q, high_);
    const VW f = hn::MulAdd(e, high_, hn::MulSub(q, high_, v));
    const VW minus_t = hn::NegMulSub(q, low_, f);
    const VW z = hn::NegMulAdd(minus_t, hn::Set(DW(), 1 + 0x1p-19f), v);
    const VW other = hn::NegMulAdd(minus_t, hn::Set(DW(), 1 - 0x1p-19f), v);
    // bits | (z ^ other), which the compiler does not make one instruction of.
    doubt.bits =
        VBits{_mm512_ternarylogic_epi32(doubt.bits.raw, hn::BitCast(bits, z).raw, hn::BitCast(bits, other).raw, 0xF6)};
    return {z};
  }

 private:
  VW high_, low_;
  const float* scale_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET <= HWY_AVX3

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_PAIR_INL_H_
