// γ + offset and β as the forms of normalize_rows_fast-inl.h want them, made ready once for many rows.
// Included once per SIMD target, by normalize_rows.cc only. The loops are plain: the compiler makes vectors of them.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "hwy/highway.h"
#include "lib/kernels/normalize_rows_internal.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_WEIGHTS_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_WEIGHTS_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_WEIGHTS_INL_H_
#endif

#if !LAYERD_BASELINE_TARGET
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

// Of columns begin .. end − 1 of a row. What is asked for at a column is valid from there to the end.
class Weights {
 public:
  // Floats of memory that n columns need at most, as whole lines of the cache.
  static int64_t Floats(int64_t n) { return (5 * n + 15) / 16 * 16; }

  // `memory` is aligned to a double.
  Weights(const NormalizeRowsArgs& args, int64_t begin, int64_t end, float* memory)
      : begin_(begin),
        n_(end - begin),
        gamma_(args.gamma == nullptr ? nullptr : args.gamma + begin),
        beta_(args.beta == nullptr ? nullptr : args.beta + begin),
        offset_(GammaOffset(args)),
        wide_(reinterpret_cast<double*>(memory)) {
    float* const made = memory + 4 * n_;
    if (gamma_ == nullptr) {
      std::fill_n(made, n_, 1.0f);
      scale_ = made;
    } else if (offset_ == 0) {
      scale_ = gamma_;
    } else if (AddOffset(made)) {
      scale_ = made;
    }
    if (scale_ != nullptr) TakeCensus();
  }

  // Whether each γ + offset is a finite float32 exactly; scale_at() is these.
  bool are_floats() const { return scale_ != nullptr; }
  const float* scale_at(int64_t column) const { return scale_ + (column - begin_); }
  // Whether each is 0 or of a magnitude from 2⁻⁶⁰ to 2⁶⁰.
  bool are_moderate() const { return moderate_; }
  // Whether each has at most 13 significant bits, as what is widened from a narrow type has.
  bool are_short() const { return short_; }

  // Makes γ + offset and β (or −0, which adds nothing) in float64. False if they are not all finite.
  HWY_NOINLINE bool MakeWide() {
    return WidenTo(wide_, gamma_, offset_, 1.0) && WidenTo(wide_ + n_, beta_, -0.0, -0.0);
  }
  const double* wide_scale_at(int64_t column) const { return wide_ + (column - begin_); }
  const double* wide_shift_at(int64_t column) const { return wide_ + n_ + (column - begin_); }

 private:
  // to[i] = from[i] + offset, or `instead` where there is no `from`. False if they are not all finite.
  bool WidenTo(double* to, const float* from, double offset, double instead) const {
    if (from == nullptr) {
      std::fill_n(to, n_, instead);
      return true;
    }
    // What is not finite differs from itself by NaN.
    const auto widen = [=](int64_t i) HWY_ATTR {
      const D d;
      const V sum = hn::Add(LoadFloat64(d, from + i), hn::Set(d, offset));
      hn::StoreU(sum, d, to + i);
      return hn::Eq(hn::Sub(sum, sum), hn::Zero(d));
    };
    const D d;
    auto finite = hn::Eq(hn::Zero(d), hn::Zero(d));
    int64_t i = 0;
    for (; i + kLanes <= n_; i += kLanes) finite = hn::And(finite, widen(i));
    bool all = hn::AllTrue(d, finite);
    for (; i < n_; ++i) {
      to[i] = static_cast<double>(from[i]) + offset;
      all = all && std::isfinite(to[i]);
    }
    return all;
  }

  bool AddOffset(float* sums) const {
    int rounded = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const double sum = static_cast<double>(gamma_[i]) + offset_;
      sums[i] = static_cast<float>(sum);
      rounded |= static_cast<double>(sums[i]) != sum ? 1 : 0;
    }
    return rounded == 0;
  }

  void TakeCensus() {
    uint32_t all = 0, largest = 0, least = ~0u;  // `least` is 1 below the least that is not 0
    for (int64_t i = 0; i < n_; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(scale_[i]);
      const uint32_t magnitude = bits & 0x7FFFFFFFu;
      all |= bits;
      largest = std::max(largest, magnitude);
      least = std::min(least, magnitude - 1);
    }
    if (largest >= std::bit_cast<uint32_t>(std::numeric_limits<float>::infinity())) scale_ = nullptr;
    moderate_ = largest <= std::bit_cast<uint32_t>(0x1p60f) && least >= std::bit_cast<uint32_t>(0x1p-60f) - 1;
    short_ = (all & 0x7FFu) == 0;
  }

  int64_t begin_;
  int64_t n_;
  const float* gamma_;
  const float* beta_;
  double offset_;
  double* wide_;
  const float* scale_ = nullptr;
  bool moderate_ = false;
  bool short_ = false;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // !LAYERD_BASELINE_TARGET

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_WEIGHTS_INL_H_
