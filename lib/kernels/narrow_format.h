// The parameters by which float64 is rounded to float16 and bfloat16, shared by the SIMD code and its scalar twin.
#ifndef LAYERD_LIB_KERNELS_NARROW_FORMAT_H_
#define LAYERD_LIB_KERNELS_NARROW_FORMAT_H_

#include <bit>
#include <cstdint>

#include "lib/base/dtype.h"

namespace layerd {

struct NarrowFormat {
  int dropped_bits;        // of float64's 52 bits of fraction
  double least_normal;     // the smallest normal value
  double beyond;           // the power of two that follows the largest value
  double base_over_scale;  // 2^dropped_bits: 2^(e + dropped_bits) has its last place where 2^e has it in the format
  uint16_t quiet_nan;
};

inline constexpr uint64_t kFloat64Exponent = uint64_t{0x7FF} << 52;

constexpr double PowerOfTwo(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// `dtype` is one of the two 16-bit types.
constexpr NarrowFormat NarrowFormatOf(DType dtype) {
  const int dropped_bits = 52 - MantissaBits(dtype);
  return {.dropped_bits = dropped_bits,
          .least_normal = PowerOfTwo(MinExponent(dtype)),
          .beyond = PowerOfTwo(2 - MinExponent(dtype)),
          .base_over_scale = PowerOfTwo(dropped_bits),
          .quiet_nan = static_cast<uint16_t>(dtype == DType::kFloat16 ? 0x7E00 : 0x7FC0)};
}

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_NARROW_FORMAT_H_
