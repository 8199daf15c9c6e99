#include "lib/kernels/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/lib/kernels/kernel_testing.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;

constexpr DType kNarrow[] = {DType::kFloat16, DType::kBFloat16};

// Most tests convert `n` elements that begin `shift` elements into an allocation.
std::vector<uint16_t> Narrow(DType dtype, const std::vector<float>& in, size_t shift = 0) {
  std::vector<uint16_t> out(in.size());
  NarrowFromFloat(dtype, in.data() + shift, reinterpret_cast<std::byte*>(out.data() + shift),
                  static_cast<int64_t>(in.size() - shift));
  return out;
}

// The value of a float16 or bfloat16 pattern by its definition: sign, exponent and fraction.
double ValueByDefinition(DType dtype, uint16_t bits) {
  const int fraction_bits = MantissaBits(dtype);
  const int exponent = (bits & 0x7FFF) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int all_ones = (1 << (15 - fraction_bits)) - 1;
  if (exponent == all_ones) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, MinExponent(dtype) - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), MinExponent(dtype) + exponent - 1 - fraction_bits);
}

TEST(WidenToFloat, IsExactOnEveryPattern) {
  std::vector<uint16_t> in(65536);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  for (const DType dtype : kNarrow) {
    SCOPED_TRACE(std::string(Name(dtype)));
    ForEachSimd([&](Simd) {
      std::vector<float> out(in.size());
      WidenToFloat(dtype, reinterpret_cast<const std::byte*>(in.data()), out.data(), 65536);
      for (size_t i = 0; i < in.size(); ++i) {
        const double want = ValueByDefinition(dtype, in[i]);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(out[i])) << i;
        } else {
          ASSERT_EQ(out[i], want) << i;
        }
        ASSERT_EQ(std::signbit(out[i]), i >= 32768) << i;
        const float twin = dtype == DType::kFloat16 ? WidenFloat16(in[i]) : WidenBFloat16(in[i]);
        ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(twin)) << i;
      }
    });
  }
}

TEST(NarrowFromFloat, GivesPinnedBFloat16Bits) {
  ForEachSimd([](Simd) {
    const std::vector<float> in = {0.2691408770292272f, 3.14f, 1.01171875f, std::numeric_limits<float>::max()};
    EXPECT_THAT(Narrow(DType::kBFloat16, in), ElementsAre(0x3E8A, 0x4049, 0x3F82, 0x7F80));
    std::vector<float> repeated;  // enough for whole vectors
    for (int i = 0; i < 16; ++i) repeated.insert(repeated.end(), in.begin(), in.end());
    EXPECT_EQ(Narrow(DType::kBFloat16, repeated)[17], 0x4049);
    EXPECT_EQ(Narrow(DType::kBFloat16, repeated)[19], 0x7F80);
  });
}

TEST(NarrowFromFloat, GivesPinnedFloat16Bits) {
  ForEachSimd([](Simd) {
    std::vector<float> in;
    for (int i = 0; i < 16; ++i) {
      in.insert(in.end(),
                {1.00048828125f, 1.00146484375f, 65519.0f, 65520.0f, std::numeric_limits<float>::quiet_NaN()});
    }
    const std::vector<uint16_t> out = Narrow(DType::kFloat16, in);
    for (size_t i = 0; i < out.size(); i += 5) {
      EXPECT_EQ(out[i], 0x3C00);
      EXPECT_EQ(out[i + 1], 0x3C02);
      EXPECT_EQ(out[i + 2], 0x7BFF);
      EXPECT_EQ(out[i + 3], 0x7C00);
      EXPECT_EQ(out[i + 4] & 0x7E00, 0x7E00);
    }
  });
}

TEST(NarrowFromFloat, KeepsNanWhatItsPayload) {
  std::vector<float> in;
  for (const uint32_t bits : {0x7F800001u, 0x7FBFFFFFu, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u, 0x7F802000u}) {
    in.insert(in.end(), 17, std::bit_cast<float>(bits));
  }
  for (const DType dtype : kNarrow) {
    ForEachSimd([&](Simd) {
      const std::vector<uint16_t> out = Narrow(dtype, in);
      for (size_t i = 0; i < in.size(); ++i) {
        EXPECT_TRUE(std::isnan(ValueByDefinition(dtype, out[i]))) << i;
        EXPECT_EQ((out[i] & 0x8000) != 0, std::signbit(in[i])) << i;
      }
    });
  }
}

// Between each two neighbours: the values themselves, the tie, and the float32 on either side of the tie.
TEST(NarrowFromFloat, RoundsToNearestAndTiesToEven) {
  for (const DType dtype : kNarrow) {
    const int infinity = dtype == DType::kFloat16 ? 0x7C00 : 0x7F80;
    std::vector<float> in;
    std::vector<uint16_t> want;
    const auto add = [&](float value, int bits) {
      in.insert(in.end(), {value, -value});
      want.insert(want.end(), {static_cast<uint16_t>(bits), static_cast<uint16_t>(bits | 0x8000)});
    };
    for (int bits = 0; bits < infinity; ++bits) {
      const double low = ValueByDefinition(dtype, static_cast<uint16_t>(bits));
      // Past the largest value comes, for the sake of rounding, the next power of two.
      const double high = bits + 1 < infinity ? ValueByDefinition(dtype, static_cast<uint16_t>(bits + 1))
                                              : std::exp2(std::ilogb(low) + 1);
      const float tie = static_cast<float>((low + high) / 2);
      ASSERT_EQ(tie, (low + high) / 2);
      add(static_cast<float>(low), bits);
      add(std::nextafter(tie, 0.0f), bits);
      add(tie, bits + (bits & 1));
      add(std::nextafter(tie, std::numeric_limits<float>::infinity()), bits + 1);
    }
    ForEachSimd([&](Simd) { EXPECT_EQ(Narrow(dtype, in), want) << Name(dtype); });
  }
}

TEST(NarrowFromFloat, EqualsTheTwinAcrossAllOfFloat32) {
  constexpr uint32_t kStride = kSanitized ? 39'119 : 977;
  std::vector<float> in;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStride) {
    in.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  for (const DType dtype : kNarrow) {
    std::vector<uint16_t> want(in.size());
    for (size_t i = 0; i < in.size(); ++i) {
      want[i] = dtype == DType::kFloat16 ? NarrowToFloat16(in[i]) : NarrowToBFloat16(in[i]);
    }
    ForEachSimd([&](Simd) { EXPECT_TRUE(Narrow(dtype, in) == want) << Name(dtype); });
  }
}

TEST(Convert, TakesAnyLengthAndElementAlignmentAndWritesNoFurther) {
  constexpr uint16_t kUntouched = 0xABCD;
  for (const DType dtype : kNarrow) {
    ForEachSimd([&](Simd) {
      for (size_t n = 0; n <= 2 * 16 + 1; ++n) {
        for (size_t shift = 0; shift < 4; ++shift) {
          std::vector<float> in(n + shift);
          for (size_t i = 0; i < n; ++i) in[shift + i] = 1.0f + static_cast<float>(i);
          std::vector<uint16_t> out(n + shift + 1, kUntouched);
          NarrowFromFloat(dtype, in.data() + shift, reinterpret_cast<std::byte*>(out.data() + shift),
                          static_cast<int64_t>(n));
          std::vector<float> back(n + shift + 1, -7.0f);
          WidenToFloat(dtype, reinterpret_cast<const std::byte*>(out.data() + shift), back.data() + shift,
                       static_cast<int64_t>(n));
          for (size_t i = 0; i < n; ++i) ASSERT_EQ(back[shift + i], in[shift + i]);
          EXPECT_EQ(out[shift + n], kUntouched);
          EXPECT_EQ(back[shift + n], -7.0f);
          if (shift > 0) {
            EXPECT_EQ(out[shift - 1], kUntouched);
          }
        }
      }
    });
  }
}

TEST(Convert, Int8GoesThereAndBackByTheRulesOfNarrowToInt8) {
  ForEachSimd([](Simd) {
    for (const int64_t n : {0, 1, 15, 16, 33, 256}) {
      std::vector<float> in, back(n);
      for (int64_t i = 0; i < n; ++i) in.push_back(static_cast<float>(i) - 128.25f);
      std::vector<int8_t> out(n + 1, 42);
      NarrowFromFloat(DType::kInt8, in.data(), reinterpret_cast<std::byte*>(out.data()), n);
      WidenToFloat(DType::kInt8, reinterpret_cast<const std::byte*>(out.data()), back.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(out[i], i - 128);
        ASSERT_EQ(back[i], static_cast<float>(i - 128));
      }
      EXPECT_EQ(out[n], 42);
    }
  });
}

TEST(Convert, CopiesFloat32BitByBit) {
  const std::vector<float> in = {1.5f, -0.0f, std::bit_cast<float>(0x7F800001u)};
  std::vector<float> wide(3), narrow(3);
  WidenToFloat(DType::kFloat32, reinterpret_cast<const std::byte*>(in.data()), wide.data(), 3);
  NarrowFromFloat(DType::kFloat32, in.data(), reinterpret_cast<std::byte*>(narrow.data()), 3);
  EXPECT_EQ(std::memcmp(wide.data(), in.data(), 12), 0);
  EXPECT_EQ(std::memcmp(narrow.data(), in.data(), 12), 0);
}

}  // namespace
}  // namespace layerd
