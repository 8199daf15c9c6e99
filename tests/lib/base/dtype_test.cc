#include "lib/base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace layerd {
namespace {

TEST(DType, KnowsSizesAndNames) {
  EXPECT_EQ(SizeOf(DType::kFloat32), 4u);
  EXPECT_EQ(SizeOf(DType::kFloat16), 2u);
  EXPECT_EQ(SizeOf(DType::kBFloat16), 2u);
  EXPECT_EQ(SizeOf(DType::kInt8), 1u);
  EXPECT_EQ(Name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(Name(DType::kInt8), "int8");
  EXPECT_TRUE(IsFloat(DType::kFloat32) && IsFloat(DType::kFloat16) && IsFloat(DType::kBFloat16));
  EXPECT_FALSE(IsFloat(DType::kInt8));
}

TEST(NarrowToInt8, RoundsToNearestEvenAndHoldsAtTheEnds) {
  for (int i = -128; i <= 127; ++i) EXPECT_EQ(NarrowToInt8(static_cast<float>(i)), i);
  for (int i = -128; i < 127; ++i) {
    const float tie = static_cast<float>(i) + 0.5f;
    const int even = i % 2 == 0 ? i : i + 1;
    EXPECT_EQ(NarrowToInt8(tie), even) << tie;
    EXPECT_EQ(NarrowToInt8(std::nextafter(tie, 200.0f)), i + 1) << tie;
    EXPECT_EQ(NarrowToInt8(std::nextafter(tie, -200.0f)), i) << tie;
  }
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(NarrowToInt8(127.75f), 127);
  EXPECT_EQ(NarrowToInt8(-128.75f), -128);
  EXPECT_EQ(NarrowToInt8(infinity), 127);
  EXPECT_EQ(NarrowToInt8(-infinity), -128);
  EXPECT_EQ(NarrowToInt8(std::numeric_limits<float>::quiet_NaN()), 0);
  EXPECT_EQ(NarrowToInt8(1e-45f), 0);
}

TEST(Int8, IsLoadedAndStoredAsOneByte) {
  std::byte bytes[256];
  for (int i = 0; i < 256; ++i) StoreFromFloat(DType::kInt8, static_cast<float>(i - 128), bytes, i);
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(bytes[i], static_cast<std::byte>(static_cast<int8_t>(i - 128)));
    EXPECT_EQ(LoadAsFloat(DType::kInt8, bytes, i), static_cast<float>(i - 128));
    EXPECT_EQ(RoundTo(DType::kInt8, static_cast<float>(i - 128)), static_cast<float>(i - 128));
  }
  EXPECT_EQ(RoundTo(DType::kInt8, -200.0f), -128.0f);
}

}  // namespace
}  // namespace layerd
