// What the kernels' tests share: running on every SIMD target, and errors in units of the last place.
#ifndef LAYERD_TESTS_LIB_KERNELS_KERNEL_TESTING_H_
#define LAYERD_TESTS_LIB_KERNELS_KERNEL_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "lib/base/dtype.h"
#include "lib/kernels/simd.h"

namespace layerd {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // tests that sweep take fewer points
#else
inline constexpr bool kSanitized = false;
#endif

// Forces a target for as long as it lives; kernels then run on the widest again.
class ForcedSimd {
 public:
  explicit ForcedSimd(Simd simd) { EXPECT_TRUE(SetSimd(simd)); }
  ~ForcedSimd() { SetSimd(SupportedSimd().back()); }
  ForcedSimd(const ForcedSimd&) = delete;
  ForcedSimd& operator=(const ForcedSimd&) = delete;
};

// Calls body(simd) with each target of this CPU forced in turn.
template <class Body>
void ForEachSimd(const Body& body) {
  for (const Simd simd : SupportedSimd()) {
    SCOPED_TRACE(std::string(Name(simd)));
    const ForcedSimd forced(simd);
    body(simd);
  }
}

// The distance of neighbouring values of `dtype` around `value`.
inline long double UlpAt(DType dtype, long double value) {
  int exponent = MinExponent(dtype);
  if (value != 0) exponent = std::max(exponent, std::ilogb(value));
  return std::ldexp(1.0L, exponent - MantissaBits(dtype));
}

// |got − want| in units of want's last place; 0 where want is an infinity, NaN or beyond the largest value, and got is
// what it rounds to.
inline long double UlpError(DType dtype, float got, long double want) {
  constexpr long double kWrong = 1e30L;
  if (std::isnan(want)) return std::isnan(got) ? 0 : kWrong;
  const long double largest =
      dtype == DType::kFloat16 ? 65504.0L : std::ldexp(2.0L - std::ldexp(1.0L, -MantissaBits(dtype)), 127);
  if (std::fabs(want) >= largest + UlpAt(dtype, largest) / 2) {
    return std::isinf(got) && std::signbit(got) == std::signbit(want) ? 0 : kWrong;
  }
  if (!std::isfinite(got)) return kWrong;
  return std::fabs(static_cast<long double>(got) - want) / UlpAt(dtype, want);
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_KERNELS_KERNEL_TESTING_H_
