#include "lib/layers/accounting.h"

#include <gtest/gtest.h>

#include "lib/base/errors.h"

namespace layerd {
namespace {

FeedForwardCost Cost(FeedForwardForm form, int64_t dim, int64_t hidden_dim, bool biases = false,
                     DType dtype = DType::kFloat32) {
  return *CostOf(form, dim, hidden_dim, biases, dtype, dtype);
}

TEST(AccountingTest, GatedWidthIsTwoThirdsOfThePlainOneRoundedUp) {
  EXPECT_EQ(*GatedHiddenDim(4096, 256), 11008);
  EXPECT_EQ(*GatedHiddenDim(512, 1), 1365);
  EXPECT_EQ(*GatedHiddenDim(1, 1), 2);
  EXPECT_EQ(*GatedHiddenDim(3, 8), 8);
  EXPECT_EQ(*GatedHiddenDim(6, 16), 16);
}

TEST(AccountingTest, GatedAndPlainLayersOfTheSeedsHaveAboutTheSameParameters) {
  EXPECT_EQ(Cost(FeedForwardForm::kPlain, 512, 2048).parameters, 2097152);
  EXPECT_EQ(Cost(FeedForwardForm::kGated, 512, 1365).parameters, 2096640);
}

TEST(AccountingTest, BiasesFlopsAndBytes) {
  const FeedForwardCost plain = Cost(FeedForwardForm::kPlain, 64, 256, true);
  EXPECT_EQ(plain.parameters, 2 * 64 * 256 + 256 + 64);
  const FeedForwardCost gated = Cost(FeedForwardForm::kGated, 4096, 11008, true, DType::kBFloat16);
  EXPECT_EQ(gated.parameters, int64_t{3} * 4096 * 11008 + 2 * 11008 + 4096);
  EXPECT_EQ(gated.flops_per_row, int64_t{6} * 4096 * 11008);
  EXPECT_EQ(gated.weight_bytes, 2 * gated.parameters);
  EXPECT_EQ(gated.activation_bytes_per_row, 2 * 4096 * 2);
}

TEST(AccountingTest, Int8MatricesHaveScalesBesideThem) {
  const FeedForwardCost gated = *CostOf(FeedForwardForm::kGated, 100, 70, true, DType::kInt8, DType::kFloat32);
  EXPECT_EQ(gated.parameters, 3 * 100 * 70 + 2 * 70 + 100);
  EXPECT_EQ(gated.flops_per_row, 6 * 100 * 70);
  EXPECT_EQ(gated.weight_bytes, 3 * 100 * 70 + 2 * (2 * 70 * 4 + 100 * 3) + 4 * (2 * 70 + 100));
  // Where blocks are full, 34 bytes stand for 32 weights.
  EXPECT_EQ(Cost(FeedForwardForm::kPlain, 4096, 11008, false, DType::kInt8).weight_bytes,
            int64_t{2} * 4096 * 11008 / 32 * 34);
}

TEST(AccountingTest, SizesOutOfRangeAreRefusedByName) {
  EXPECT_EQ(DetailsOf(GatedHiddenDim(0, 256).status()).field, "dim");
  EXPECT_EQ(DetailsOf(GatedHiddenDim(4096, 0).status()).field, "multiple_of");
  EXPECT_EQ(DetailsOf(CostOf(FeedForwardForm::kPlain, -1, 4, false, DType::kFloat32, DType::kFloat32).status()).field,
            "dim");
  EXPECT_EQ(
      DetailsOf(
          CostOf(FeedForwardForm::kGated, 2147483647, 2147483647, false, DType::kFloat32, DType::kFloat32).status())
          .field,
      "hidden_dim");
}

}  // namespace
}  // namespace layerd
