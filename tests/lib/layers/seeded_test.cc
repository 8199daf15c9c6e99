#include "lib/layers/seeded.h"

#include <gtest/gtest.h>

#include <cmath>

namespace layerd {
namespace {

// The first values of seed 1, worked out from the header's formula in another language; they must never change.
TEST(SeededTest, ValuesArePinned) {
  const Tensor input = SeededInput(1, DType::kFloat32, {4});
  EXPECT_EQ(input.At(0), -0.968176603f);
  EXPECT_EQ(input.At(1), 1.44942653f);
  const FeedForwardWeights weights = SeededFeedForwardWeights(1, SwiGluSpec(), DType::kFloat32, 512, 4, false);
  EXPECT_EQ(weights.gate->At(0), 0.0390125997f);
  EXPECT_EQ(SeededGamma(1, DType::kFloat32, 4).At(3), 1.01991451f);
}

TEST(SeededTest, SeedsAndNamesGiveDifferentValues) {
  const Tensor a = SeededTensor(1, "gate", DType::kFloat32, {64}, 1.0);
  EXPECT_TRUE(SameBits(a, SeededTensor(1, "gate", DType::kFloat32, {64}, 1.0)));
  EXPECT_FALSE(SameBits(a, SeededTensor(2, "gate", DType::kFloat32, {64}, 1.0)));
  EXPECT_FALSE(SameBits(a, SeededTensor(1, "up", DType::kFloat32, {64}, 1.0)));
}

TEST(SeededTest, ValuesAreUniformWithTheStatedScale) {
  const Tensor input = SeededInput(42, DType::kFloat32, {100000});
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < input.num_elements(); ++i) {
    ASSERT_LE(std::fabs(input.At(i)), std::sqrt(3.0f));
    sum += input.At(i);
    squares += input.At(i) * input.At(i);
  }
  EXPECT_NEAR(sum / 1e5, 0.0, 0.02);
  EXPECT_NEAR(squares / 1e5, 1.0, 0.02);
}

TEST(SeededTest, NarrowTensorsAreTheWideOnesRounded) {
  const Tensor wide = SeededInput(3, DType::kFloat32, {50});
  const Tensor narrow = SeededInput(3, DType::kBFloat16, {50});
  for (int64_t i = 0; i < 50; ++i) EXPECT_EQ(narrow.At(i), RoundTo(DType::kBFloat16, wide.At(i)));
}

TEST(SeededTest, WeightsFitTheirSpec) {
  for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    for (const GateUpPacking packing :
         {GateUpPacking::kSeparate, GateUpPacking::kHalves, GateUpPacking::kInterleaved}) {
      FeedForwardSpec spec;
      spec.layout = layout;
      spec.packing = packing;
      spec.inner_norm.emplace();
      const auto extent = CheckFeedForward(spec, SeededFeedForwardWeights(1, spec, DType::kFloat16, 8, 12, true),
                                           SeededInput(1, DType::kFloat16, {2, 8}));
      ASSERT_TRUE(extent.ok()) << extent.status();
      EXPECT_EQ(extent->hidden_dim, 12);
      EXPECT_EQ(extent->out_dim, 8);
    }
  }
}

}  // namespace
}  // namespace layerd
