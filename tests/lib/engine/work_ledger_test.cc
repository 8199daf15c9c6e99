#include "lib/engine/work_ledger.h"

#include <gtest/gtest.h>

namespace layerd {
namespace {

constexpr absl::Duration kSecond = absl::Seconds(1);
const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

absl::Time At(double seconds) { return kStart + absl::Seconds(seconds); }

// A ledger of one worker that does 100 a second: seen on two calls and more at a time for a long while.
WorkLedger Measured() {
  WorkLedger ledger(1);
  ledger.Add(At(-10), absl::InfiniteFuture(), 100);
  for (int second = -9; second <= 0; ++second) {
    const auto next = ledger.Add(At(second), absl::InfiniteFuture(), 100);
    const auto another = ledger.Add(At(second), absl::InfiniteFuture(), 100);
    ledger.Remove(At(second), another, true);
    ledger.Remove(At(second), next, false);
  }
  return ledger;
}

TEST(WorkLedgerTest, NothingIsLateWhereNothingIsThere) {
  WorkLedger ledger(4);
  EXPECT_EQ(ledger.Lateness(At(0), At(-5), 1e30), absl::ZeroDuration());
  const auto entry = ledger.Add(At(0), At(1), 5);
  EXPECT_FALSE(ledger.empty());
  EXPECT_GT(ledger.Lateness(At(0), At(-5), 1), 5 * kSecond);
  ledger.Remove(At(1), entry, true);
  EXPECT_TRUE(ledger.empty());
  EXPECT_EQ(ledger.Lateness(At(0), At(-5), 1e30), absl::ZeroDuration());
}

TEST(WorkLedgerTest, ACallWaitsForWhatIsUnderWayAndForThoseWithEarlierDeadlines) {
  WorkLedger ledger = Measured();  // 100 of work are under way, and have no deadline
  EXPECT_NEAR(absl::ToDoubleSeconds(ledger.Needed(100)), 1, 0.01);
  ledger.Add(At(0), At(20), 300);
  // One under way, one before it, and itself: ((100 + 300) · 2 + 100 · 1.25) / 100 · 4/3 = 12.3 s.
  EXPECT_EQ(ledger.Lateness(At(0), At(20), 100), absl::ZeroDuration());
  ledger.Add(At(0), At(40), 1300);
  // Before both: (100 · 2 + 100 · 1.25) / 100 · 4/3 = 4.3 s.
  EXPECT_EQ(ledger.Lateness(At(0), At(4.4), 100), absl::ZeroDuration());
  EXPECT_NEAR(absl::ToDoubleSeconds(ledger.Lateness(At(0), At(4), 100)), 0.33, 0.02);
  // What has been computed half a second is done so much sooner.
  EXPECT_NEAR(absl::ToDoubleSeconds(ledger.Lateness(At(0.5), At(3), 100)), 0.5, 0.02);
  // Without a deadline nothing is late.
  EXPECT_EQ(ledger.Lateness(At(0), absl::InfiniteFuture(), 1e9), absl::ZeroDuration());
}

TEST(WorkLedgerTest, ACallMayNotMakeAnAcceptedOneLate) {
  WorkLedger ledger = Measured();
  ledger.Add(At(0), At(10), 500);  // 500 · 1.25 / 100 · 4/3 = 8.3 s
  EXPECT_EQ(ledger.Lateness(At(0), At(5), 50), absl::ZeroDuration());
  // 10 s and a little with it: it would itself be in time, the other not.
  EXPECT_GT(ledger.Lateness(At(0), At(5), 63), absl::ZeroDuration());
  EXPECT_LT(ledger.Lateness(At(0), At(5), 63), 0.1 * kSecond);
  // One that is lost already keeps nobody out.
  ledger.Add(At(0), At(11), 10000);
  EXPECT_EQ(ledger.Lateness(At(0), At(5), 50), absl::ZeroDuration());
}

TEST(WorkLedgerTest, WorkThatWasGivenUpSaysNothingOfTheRate) {
  WorkLedger ledger = Measured();
  const absl::Duration before = ledger.Needed(1e9);
  const auto entry = ledger.Add(At(0), At(1), 1e9);
  const auto other = ledger.Add(At(0), At(1), 1e9);
  ledger.Remove(At(0.1), entry, false);
  ledger.Remove(At(0.1), other, false);
  EXPECT_EQ(ledger.Needed(1e9), before);
}

TEST(WorkLedgerTest, ARateMeasuredWhileIdleCountsOnlyWhereItIsHigher) {
  WorkLedger ledger(2);
  const auto one = [&](double begun, double seconds) {
    const auto entry = ledger.Add(At(begun), absl::InfiniteFuture(), 1e12);
    ledger.Remove(At(begun + seconds), entry, true);
  };
  const auto seconds = [&] { return absl::ToDoubleSeconds(ledger.Needed(1e12)); };
  one(0, 10);
  EXPECT_NEAR(seconds(), 10, 0.1);
  one(100, 40);  // one call alone may have used half of the machine
  EXPECT_NEAR(seconds(), 10, 0.1);
  one(200, 5);
  EXPECT_NEAR(seconds(), 5, 0.1);
  // While twice as many as workers are there it counts either way.
  std::vector<WorkLedger::Entry> entries;
  for (int i = 0; i < 4; ++i) entries.push_back(ledger.Add(At(300), absl::InfiniteFuture(), 1e12));
  ledger.Remove(At(340), entries[0], true);
  EXPECT_NEAR(seconds(), 40, 0.1);
}

}  // namespace
}  // namespace layerd
