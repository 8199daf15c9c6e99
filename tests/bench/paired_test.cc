#include "bench/paired.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace layerd::bench {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

// Answers one value after the other, from the first again after the last.
class Values {
 public:
  explicit Values(std::vector<double> values) : values_(std::move(values)) {}
  double operator()() const { return values_[next_++ % values_.size()]; }
  size_t asked() const { return next_; }

 private:
  const std::vector<double> values_;
  mutable size_t next_ = 0;
};

TEST(MedianTest, IsTheMiddleOrTheMeanOfTheTwoInTheMiddle) {
  EXPECT_EQ(Median({3}), 3);
  EXPECT_EQ(Median({9, 1, 5}), 5);
  EXPECT_EQ(Median({9, 1, 5, 7}), 6);
}

TEST(MeasurePairsTest, TakesTheMedianOfThePairsRatiosNotTheRatioOfTheMedians) {
  // While the machine is slow both are: the ratio is 2, 2, 2, 2.5, 2.
  const Values ours({2, 20, 4, 5, 6}), other({1, 10, 2, 2, 3});
  const Paired paired = MeasurePairs({.pairs = 5}, ours, other);
  EXPECT_EQ(paired.ratio, 2);
  EXPECT_EQ(paired.seconds, 5);
  EXPECT_EQ(paired.other_seconds, 2);
  EXPECT_EQ(paired.spread, 1.25);
  EXPECT_EQ(paired.attempts, 1);
}

TEST(MeasurePairsTest, TakesTurns) {
  std::vector<char> order;
  const auto ours = [&order] { return order.push_back('A'), 1.0; };
  const auto other = [&order] { return order.push_back('B'), 1.0; };
  MeasurePairs({.pairs = 1}, ours, other);  // 5 are the least
  EXPECT_THAT(order, ElementsAre('A', 'B', 'A', 'B', 'A', 'B', 'A', 'B', 'A', 'B'));
}

TEST(MeasurePairsTest, MeasuresAgainWhatIsSpreadTooWide) {
  const Values ours({1, 1, 1, 1, 2, /* again */ 3, 3, 3, 3, 3.3}), other({1});
  const Paired paired = MeasurePairs({.pairs = 5}, ours, other);
  EXPECT_EQ(paired.ratio, 3);
  EXPECT_THAT(paired.spread, DoubleNear(1.1, 1e-12));
  EXPECT_EQ(paired.attempts, 2);
}

TEST(MeasurePairsTest, KeepsTheLeastSpreadWhenAttemptsAreUsedUp) {
  const Values ours({1, 1, 1, 1, 4, /* again */ 2, 2, 2, 2, 3, /* and again */ 1, 1, 1, 1, 5}), other({1});
  const Paired paired = MeasurePairs({.pairs = 5, .attempts = 3}, ours, other);
  EXPECT_EQ(paired.spread, 1.5);
  EXPECT_EQ(paired.ratio, 2);
  EXPECT_EQ(paired.attempts, 3);
  EXPECT_EQ(ours.asked(), 15u);
}

TEST(SamplerTest, CallsTheWorkAtLeastOnceASample) {
  int calls = 0;
  const Sampler sampler([&calls] { ++calls; }, 0.0);
  const int before = calls;
  EXPECT_GE(sampler(), 0);
  EXPECT_GT(calls, before);
}

}  // namespace
}  // namespace layerd::bench
