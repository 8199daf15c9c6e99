// The formula in forms that are cheaper than normalize_rows_exact-inl.h and give its very bits.
//
// Most of the cost of the exact form is float64: half the elements in a vector, and conversions in and out. What is
// wanted is the exact form's float64 result Y rounded to the output's type. So an estimate z of Y is made in float32,
// with a bound on its error; unless some point at which the rounding changes lies between z and Y, both round to the
// same. Where one may lie there, which is rare, the exact form is computed after all.
// Included once per SIMD target, by normalize_rows.cc only.

#include <cmath>

#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"
#include "lib/kernels/normalize_rows_exact-inl.h"
#include "lib/kernels/normalize_rows_internal.h"
#include "lib/kernels/normalize_rows_source-inl.h"
#include "lib/kernels/normalize_rows_weights-inl.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_FAST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_FAST_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_FAST_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_FAST_INL_H_
#endif

#if !LAYERD_BASELINE_TARGET
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

using DBits = hn::Rebind<uint32_t, DW>;
using DSigned = hn::Rebind<int32_t, DW>;
using DNarrow = hn::Rebind<uint16_t, DW>;
using VBits = hn::Vec<DBits>;
using MaskWide = hn::Mask<DBits>;

// ---- estimates --------------------------------------------------------------------------------------------------

// An estimate within 3 units of float32's last place of the exact value is on the same side of every tie of the narrow
// type as that, unless it lies within 4 units of one. bfloat16's ties are float32's patterns that end in 0x8000.
HWY_INLINE MaskWide NearTie(VW z, hwy::bfloat16_t) {
  const DBits d;
  const VBits moved = hn::Add(hn::BitCast(d, z), hn::Set(d, 0x8004u));
  return hn::Eq(hn::And(moved, hn::Set(d, 0xFFF8u)), hn::Zero(d));
}

// float16's end in 0x1000, down to its least normal value; what is below that (but 0) counts as near one.
HWY_INLINE MaskWide NearTie(VW z, hwy::float16_t) {
  const DBits d;
  const DSigned ds;
  const VBits moved = hn::Add(hn::BitCast(d, z), hn::Set(d, 0x1004u));
  const MaskWide normal = hn::Eq(hn::And(moved, hn::Set(d, 0x1FF8u)), hn::Zero(d));
  const auto magnitude = hn::BitCast(ds, hn::And(hn::BitCast(d, z), hn::Set(d, 0x7FFFFFFFu)));
  const auto below =
      hn::And(hn::Gt(magnitude, hn::Zero(ds)), hn::Lt(magnitude, hn::Set(ds, int32_t{(127 - 14) << 23})));
  return hn::Or(normal, hn::RebindMask(d, below));
}

// Rounded to the narrow type, as float32: z is not near a tie (and, for float16, neither below its least normal value
// nor beyond its largest).
HWY_INLINE VW RoundAwayFromTies(VW z, hwy::bfloat16_t) {
  const DBits d;
  return hn::BitCast(DW(), hn::And(hn::Add(hn::BitCast(d, z), hn::Set(d, 0x8000u)), hn::Set(d, 0xFFFF0000u)));
}
HWY_INLINE VW RoundAwayFromTies(VW z, hwy::float16_t) {
  const DBits d;
  return hn::BitCast(DW(), hn::And(hn::Add(hn::BitCast(d, z), hn::Set(d, 0x1000u)), hn::Set(d, 0xFFFFE000u)));
}

// The 16 bits of z, which is not NaN, rounded to nearest even.
HWY_INLINE hn::Vec<DNarrow> NarrowBits(VW z, hwy::bfloat16_t) {
  const DBits d;
  const VBits bits = hn::BitCast(d, z);
  const VBits last_kept = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1u));
  return hn::TruncateTo(DNarrow(), hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d, 0x7FFFu)), last_kept)));
}
HWY_INLINE hn::Vec<DNarrow> NarrowBits(VW z, hwy::float16_t) {
  return hn::BitCast(DNarrow(), hn::DemoteTo(hn::Rebind<hwy::float16_t, DW>(), z));
}
// The same where z is not near a tie either.
HWY_INLINE hn::Vec<DNarrow> NarrowBitsAwayFromTies(VW z, hwy::bfloat16_t) {
  const DBits d;
  return hn::TruncateTo(DNarrow(), hn::ShiftRight<16>(hn::Add(hn::BitCast(d, z), hn::Set(d, 0x8000u))));
}
HWY_INLINE hn::Vec<DNarrow> NarrowBitsAwayFromTies(VW z, hwy::float16_t type) { return NarrowBits(z, type); }

// ---- pieces -----------------------------------------------------------------------------------------------------
//
// kWideLanes elements of the output, before they are written. Where it IsDoubtful(), some element may be wrong, and
// Take() what the exact form gives. Put() with `stream` writes past the caches; `to` is aligned to a piece then.

template <class DAny, class T>
HWY_INLINE void PutVector(DAny d, hn::Vec<DAny> value, T* to, bool stream) {
  auto* const at = reinterpret_cast<hn::TFromD<DAny>*>(to);
  if (stream) {
    hn::Stream(value, d, at);
  } else {
    hn::StoreU(value, d, at);
  }
}

struct FloatPiece {
  VW value;
  HWY_INLINE void Put(float* to, bool stream) const { PutVector(DW(), value, to, stream); }
  static constexpr bool IsDoubtful() { return false; }
  void Take(const float* /*exact*/) {}
};

// Two stores cost less than to put the halves together.
struct HalvesPiece {
  using DHalf = hn::Rebind<float, D>;
  hn::Vec<DHalf> low, high;
  HWY_INLINE void Put(float* to, bool stream) const {
    PutVector(DHalf(), low, to, stream);
    PutVector(DHalf(), high, to + kLanes, stream);
  }
  static constexpr bool IsDoubtful() { return false; }
  void Take(const float* /*exact*/) {}
};

struct EstimatedFloatPiece : FloatPiece {
  MaskWide doubt;
  HWY_INLINE bool IsDoubtful() const { return !hn::AllFalse(DBits(), doubt); }
  HWY_INLINE void Take(const float* exact) { value = hn::LoadU(DW(), exact); }
};

struct NarrowPiece {
  hn::Vec<DNarrow> bits;
  MaskWide doubt;
  template <class T16>
  HWY_INLINE void Put(T16* to, bool stream) const {
    PutVector(DNarrow(), bits, to, stream);
  }
  HWY_INLINE bool IsDoubtful() const { return !hn::AllFalse(DBits(), doubt); }
  template <class T16>
  HWY_INLINE void Take(const T16* exact) {
    bits = hn::LoadU(DNarrow(), reinterpret_cast<const uint16_t*>(exact));
  }
};

// How many elements after `to` the next piece begins that can be streamed.
template <class T>
int64_t ElementsToAlignment(const T* to) {
  constexpr uintptr_t kBytes = kWideLanes * sizeof(T);
  return static_cast<int64_t>((kBytes - reinterpret_cast<uintptr_t>(to) % kBytes) % kBytes / sizeof(T));
}

// Two vectors of float64, none of them NaN, rounded to the output's type once.
HWY_INLINE HalvesPiece Rounded(V low, V high, float /*out*/) {
  const HalvesPiece::DHalf half;
  return {hn::DemoteTo(half, low), hn::DemoteTo(half, high)};
}
template <class T16>
HWY_INLINE NarrowPiece Rounded(V low, V high, T16 out) {
  const HalvesPiece::DHalf half;
  const VW z = hn::Combine(DW(), hn::DemoteTo(half, high), hn::DemoteTo(half, low));
  return {NarrowBitsAwayFromTies(z, out), NearTie(z, out)};
}

// ---- forms ------------------------------------------------------------------------------------------------------
//
// A form makes the output of one group, whose sums of kFirstTerm come first: Begin(), then Compute() for pieces in any
// order, from what ColumnsAt() gives, which is the same for all rows. Takes() says whether it is right for a group at all.
//
// Some forms do not know of each piece whether it is right, but of all that was computed since ClearDoubts() together:
// IsSure(), with the Doubt that Compute() adds to, one for groups that are gone through side by side.

struct GroupInput {
  const float* x;
  NormalizeGroup group;
  GroupStatistics statistics;
};

// How many groups of a form may be gone through side by side.
inline constexpr int kMostSideBySide = 2;

template <class OutType>
class Form {
 public:
  using Out = OutType;
  // Groups that go side by side, and where the output is streamed.
  static constexpr int kSideBySide = 1;
  static constexpr int kStreamedSideBySide = 1;

  struct Doubt {
    void Clear() {}
  };
  static void ClearDoubts() {}
  static bool IsSure(const Doubt& /*doubt*/) { return true; }

  Out* out() const { return out_; }

  // Writes the piece at `column`. A doubtful one is put right before and not after: part of a line that was streamed
  // already would have to be read again.
  template <class Piece>
  HWY_INLINE void Put(Piece piece, int64_t column, bool stream) const {
    if (HWY_UNLIKELY(piece.IsDoubtful())) {
      Out exact[kWideLanes];
      ComputeExactly(column, kWideLanes, exact);
      piece.Take(exact);
    }
    piece.Put(out_ + column, stream);
  }
  // Writes `count` elements by the exact form.
  void WriteExactly(int64_t column, int64_t count) const { ComputeExactly(column, count, out_ + column); }

 protected:
  // Both outlive the form.
  HWY_INLINE void Begin(const NormalizeRowsArgs& args, const GroupInput& in) {
    args_ = &args;
    in_ = &in;
    out_ = reinterpret_cast<Out*>(args.output) + in.group.first;
  }

 private:
  HWY_NOINLINE void ComputeExactly(int64_t column, int64_t count, Out* to) const {
    const Formula formula = FormulaOf(*args_, in_->group, in_->statistics).From(column);
    ApplyFormula<float, Out>(formula, in_->x + column, nullptr, to, count);
  }

  const NormalizeRowsArgs* args_;
  const GroupInput* in_;
  Out* out_;
};

// float64 with γ and β ready: for LayerNorm, and for RMSNorm where nothing below is right.
template <class Out, bool kCentred>
class WideForm : public Form<Out> {
 public:
  // γ and β are read once for both; narrower vectors have not the registers.
  static constexpr int kSideBySide = kLanes == 8 ? kMostSideBySide : 1;
  static constexpr int kStreamedSideBySide = kSideBySide;
  static constexpr SumTerm kFirstTerm = kCentred ? SumTerm::kValueAndSquare : SumTerm::kSquare;
  static bool Takes(const GroupStatistics& statistics) {
    return std::isfinite(statistics.mean) && std::isfinite(statistics.inverse) && statistics.inverse > 0;
  }

  HWY_INLINE void Begin(const NormalizeRowsArgs& args, const Weights& weights, const GroupInput& in) {
    Form<Out>::Begin(args, in);
    mean_ = hn::Set(D(), in.statistics.mean);
    inverse_ = hn::Set(D(), in.statistics.inverse);
    scale_ = weights.wide_scale_at(in.group.offset);
    shift_ = weights.wide_shift_at(in.group.offset);
  }

  struct Columns {
    V low_scale, high_scale, low_shift, high_shift;
  };
  HWY_INLINE Columns ColumnsAt(int64_t column) const {
    const D d;
    return {hn::LoadU(d, scale_ + column), hn::LoadU(d, scale_ + column + kLanes), hn::LoadU(d, shift_ + column),
            hn::LoadU(d, shift_ + column + kLanes)};
  }

  HWY_INLINE auto Compute(const float* x, const Columns& at, typename Form<Out>::Doubt& /*doubt*/) const {
    return Rounded(Value(x, at.low_scale, at.low_shift), Value(x + kLanes, at.high_scale, at.high_shift), Out());
  }

 private:
  HWY_INLINE V Value(const float* x, V scale, V shift) const {
    V n = LoadFloat64(D(), x);
    if (kCentred) n = hn::Sub(n, mean_);
    return hn::MulAdd(hn::Mul(n, inverse_), scale, shift);
  }

  V mean_, inverse_;
  const double* scale_;
  const double* shift_;
};

// Whether factors of r's size keep float32 far from its limits.
inline bool IsModerate(double r) { return r >= 0x1p-60 && r <= 0x1p60; }

// What the forms of RMSNorm in float32 share.
template <class Out>
class EstimatingForm : public Form<Out> {
 public:
  static constexpr SumTerm kFirstTerm = SumTerm::kSquare;
  static bool Takes(const GroupStatistics& statistics) { return IsModerate(statistics.inverse); }

  HWY_INLINE void Begin(const NormalizeRowsArgs& args, const Weights& weights, const GroupInput& in) {
    Form<Out>::Begin(args, in);
    inverse_ = hn::Set(DW(), static_cast<float>(in.statistics.inverse));
    scale_ = weights.scale_at(in.group.offset);
  }

  HWY_INLINE VW ColumnsAt(int64_t column) const { return hn::LoadU(DW(), scale_ + column); }

 protected:
  VW inverse_;

 private:
  const float* scale_;
};

// RMSNorm to a narrow type, rounded once: z = x·(r·γ). Each of its three roundings (r's to float32 is one) is at most
// half a unit of the last place: together less than 3 units of z's. Where z is denormal they are fewer still.
template <class T16>
class NarrowForm : public EstimatingForm<T16> {
 public:
  HWY_INLINE NarrowPiece Compute(const float* x, VW scale, typename Form<T16>::Doubt& /*doubt*/) const {
    const VW z = hn::Mul(hn::LoadU(DW(), x), hn::Mul(this->inverse_, scale));
    return {NarrowBitsAwayFromTies(z, T16()), NearTie(z, T16())};
  }
};

// RMSNorm with n rounded to the input's type T16 before γ. n's estimate x·r has two roundings. The product of the
// rounded n and γ has at most 11 + 24 bits, so it is exact in float64 and one rounding takes it to float32. A narrow
// output takes it from there: if γ has few bits (it is a narrow type's) it was exact and is rounded as it is; else its
// rounding makes it an estimate.
template <class T16, class Out, bool kShortScale>
class RoundedForm : public EstimatingForm<Out> {
 public:
  HWY_INLINE auto Compute(const float* x, VW scale, typename Form<Out>::Doubt& /*doubt*/) const {
    const VW n = hn::Mul(hn::LoadU(DW(), x), this->inverse_);
    const VW product = hn::Mul(RoundAwayFromTies(n, T16()), scale);
    auto piece = Finish(product, Out());
    piece.doubt = hn::Or(piece.doubt, NearTie(n, T16()));
    return piece;
  }

 private:
  static HWY_INLINE EstimatedFloatPiece Finish(VW product, float /*out*/) { return {{product}, None()}; }
  static HWY_INLINE NarrowPiece Finish(VW product, T16 out) {
    if (!kShortScale) return {NarrowBitsAwayFromTies(product, out), NearTie(product, out)};
    return {NarrowBits(product, out), Inexact(product, out)};
  }
  // Where the product may not be exact although it is short: where it is denormal. float16 has nothing there.
  static HWY_INLINE MaskWide Inexact(VW product, hwy::bfloat16_t) {
    const DBits d;
    const DSigned ds;
    const auto magnitude = hn::BitCast(ds, hn::And(hn::BitCast(d, product), hn::Set(d, 0x7FFFFFFFu)));
    return hn::RebindMask(d, hn::And(hn::Gt(magnitude, hn::Zero(ds)), hn::Lt(magnitude, hn::Set(ds, 1 << 23))));
  }
  static HWY_INLINE MaskWide Inexact(VW /*product*/, hwy::float16_t) { return None(); }
  static HWY_INLINE MaskWide None() { return hn::MaskFromVec(hn::Zero(DBits())); }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // !LAYERD_BASELINE_TARGET

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_FAST_INL_H_
