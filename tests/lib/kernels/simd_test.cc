#include "lib/kernels/simd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "hwy/targets.h"
#include "tests/lib/kernels/kernel_testing.h"

namespace layerd {
namespace {

using ::testing::Eq;
using ::testing::Optional;

TEST(Simd, NamesParseBackToThemselves) {
  for (const Simd simd : {Simd::kScalar, Simd::kAvx2, Simd::kAvx512})
    EXPECT_THAT(ParseSimd(Name(simd)), Optional(simd));
}

TEST(Simd, RefusesNamesItDoesNotKnow) {
  EXPECT_THAT(ParseSimd(""), Eq(std::nullopt));
  EXPECT_THAT(ParseSimd("AVX2"), Eq(std::nullopt));
  EXPECT_THAT(ParseSimd("sse4"), Eq(std::nullopt));
}

TEST(Simd, SupportsScalarFirstAndWidestLast) {
  const std::vector<Simd> supported = SupportedSimd();
  ASSERT_FALSE(supported.empty());
  EXPECT_EQ(supported.front(), Simd::kScalar);
  EXPECT_TRUE(std::is_sorted(supported.begin(), supported.end()));
}

TEST(Simd, StartsWithTheWidest) { EXPECT_EQ(ActiveSimd(), SupportedSimd().back()); }

TEST(Simd, ForcesEachSupportedTarget) {
  ForEachSimd([](Simd simd) { EXPECT_EQ(ActiveSimd(), simd); });
}

TEST(Simd, RefusesAnUnsupportedTargetAndChangesNothing) {
  const std::vector<Simd> supported = SupportedSimd();
  const Simd before = ActiveSimd();
  for (const Simd simd : {Simd::kAvx2, Simd::kAvx512}) {
    if (std::find(supported.begin(), supported.end(), simd) != supported.end()) continue;
    EXPECT_FALSE(SetSimd(simd));
    EXPECT_EQ(ActiveSimd(), before);
  }
}

#if HWY_ARCH_X86
// What every kernel test says of having run on a target rests on this.
TEST(Simd, MakesHighwayDispatchToTheForcedTarget) {
  ForEachSimd([](Simd simd) {
    hwy::ChosenTarget expected;
    expected.Update(simd == Simd::kAvx512 ? HWY_AVX3 : simd == Simd::kAvx2 ? HWY_AVX2 : 0);
    EXPECT_TRUE(hwy::GetChosenTarget().IsInitialized());
    EXPECT_EQ(hwy::GetChosenTarget().GetIndex(), expected.GetIndex());
  });
}
#endif

}  // namespace
}  // namespace layerd
