#include "lib/base/shape.h"

#include <gtest/gtest.h>

#include <limits>

#include "lib/base/errors.h"

namespace layerd {
namespace {

std::string ReasonFor(Shape shape) { return DetailsOf(NumElements(shape).status()).reason; }

TEST(ShapeTest, CountsElements) {
  EXPECT_EQ(*NumElements({}), 1);
  EXPECT_EQ(*NumElements({7}), 7);
  EXPECT_EQ(*NumElements({2, 3, 4}), 24);
  EXPECT_EQ(*NumElements({0}), 0);
  EXPECT_EQ(*NumElements({5, 0, 2147483647}), 0);
}

TEST(ShapeTest, RefusesWhatOverflowsBeforeItMultiplies) {
  EXPECT_EQ(ReasonFor({16, (int64_t{1} << 60) + 2}), "DIMENSION_TOO_LARGE");
  EXPECT_EQ(ReasonFor({4611686018427387906}), "DIMENSION_TOO_LARGE");
  EXPECT_EQ(ReasonFor({std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()}),
            "DIMENSION_TOO_LARGE");
  EXPECT_EQ(ReasonFor({2147483648}), "DIMENSION_TOO_LARGE");
  EXPECT_EQ(ReasonFor({2147483647, 2147483647, 2147483647, 2147483647}), "SHAPE_OVERFLOW");
  EXPECT_EQ(ReasonFor({int64_t{1} << 20, int64_t{1} << 19}), "SHAPE_OVERFLOW");
  EXPECT_EQ(ReasonFor({5, 0, 2147483647, 2147483647}), "SHAPE_OVERFLOW");
  EXPECT_EQ(*NumElements({int64_t{1} << 20, int64_t{1} << 18}), int64_t{1} << 38);
}

TEST(ShapeTest, RefusesNegativeDimensionsEvenBesideAZero) {
  EXPECT_EQ(ReasonFor({-1}), "NEGATIVE_DIMENSION");
  EXPECT_EQ(ReasonFor({0, -1}), "NEGATIVE_DIMENSION");
  EXPECT_EQ(ReasonFor({std::numeric_limits<int64_t>::min()}), "NEGATIVE_DIMENSION");
}

TEST(ShapeTest, RefusesTooManyDimensions) {
  EXPECT_EQ(*NumElements(Shape(8, 1)), 1);
  EXPECT_EQ(ReasonFor(Shape(9, 1)), "RANK_TOO_LARGE");
}

TEST(ShapeTest, PrintsLongShapesShort) {
  EXPECT_EQ(ToString({}), "[]");
  EXPECT_EQ(ToString({2, 64}), "[2, 64]");
  EXPECT_LT(ToString(Shape(100000, 1)).size(), 100u);
}

}  // namespace
}  // namespace layerd
