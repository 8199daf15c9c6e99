#include "lib/base/byte_budget.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

constexpr absl::Time kNoDeadline = absl::InfiniteFuture();

// Keeps what is granted, with its number.
struct Granting {
  std::vector<std::pair<int, ByteBudget::Share>> shares;
  std::vector<absl::Status> errors;
  ByteBudget::Granted As(int number) {
    return [this, number](absl::StatusOr<ByteBudget::Share> share) {
      if (!share.ok()) return errors.push_back(share.status());
      shares.emplace_back(number, *std::move(share));
    };
  }
};

TEST(ByteBudgetTest, SharesAreGivenWhileThereIsRoom) {
  ByteBudget budget(100, 2, "--flag");
  auto first = budget.TryTake(60);
  ASSERT_TRUE(first.has_value());
  EXPECT_FALSE(budget.TryTake(41).has_value());
  auto second = budget.TryTake(40);
  ASSERT_TRUE(second.has_value());
  first->ShrinkTo(10);
  EXPECT_EQ(first->bytes(), 10);
  first->ShrinkTo(20);  // no growing
  EXPECT_EQ(first->bytes(), 10);
  auto third = budget.TryTake(50);
  ASSERT_TRUE(third.has_value());
  EXPECT_FALSE(budget.TryTake(1).has_value());
  third = ByteBudget::Share();
  EXPECT_TRUE(budget.TryTake(50).has_value());
}

TEST(ByteBudgetTest, MoreThanAllIsGivenWhereNobodyHasAny) {
  ByteBudget budget(100, 2, "--flag");
  {
    auto large = budget.TryTake(1000);
    ASSERT_TRUE(large.has_value());
    EXPECT_FALSE(budget.TryTake(1).has_value());
  }
  auto small = budget.TryTake(1);
  ASSERT_TRUE(small.has_value());
  EXPECT_FALSE(budget.TryTake(1000).has_value());
}

TEST(ByteBudgetTest, TheLineIsServedInOrderAndNobodyOvertakes) {
  ByteBudget budget(100, 5, "--flag");
  Granting granting;
  auto all = budget.TryTake(100);
  ASSERT_TRUE(budget.Wait(80, kNoDeadline, granting.As(1)).ok());
  ASSERT_TRUE(budget.Wait(10, kNoDeadline, granting.As(2)).ok());
  ASSERT_TRUE(budget.Wait(30, kNoDeadline, granting.As(3)).ok());
  all->ShrinkTo(50);  // room for the second, but it is the first one's turn
  EXPECT_TRUE(granting.shares.empty());
  EXPECT_FALSE(budget.TryTake(1).has_value());
  all.reset();
  ASSERT_EQ(granting.shares.size(), 2);
  EXPECT_EQ(granting.shares[0].first, 1);
  EXPECT_EQ(granting.shares[1].first, 2);
  EXPECT_EQ(granting.shares[0].second.bytes(), 80);
  granting.shares[1].second.ShrinkTo(0);
  EXPECT_EQ(granting.shares.size(), 2);
  granting.shares[0].second.ShrinkTo(70);
  ASSERT_EQ(granting.shares.size(), 3);
  EXPECT_EQ(granting.shares[2].first, 3);
}

TEST(ByteBudgetTest, WhoFindsRoomIsServedBeforeWaitReturns) {
  ByteBudget budget(100, 1, "--flag");
  Granting granting;
  ASSERT_TRUE(budget.Wait(100, kNoDeadline, granting.As(1)).ok());
  EXPECT_EQ(granting.shares.size(), 1);
}

TEST(ByteBudgetTest, WhoLeavesGetsNothingAndLetsOthersPass) {
  ByteBudget budget(100, 5, "--flag");
  Granting granting;
  auto held = budget.TryTake(50);
  const auto large = budget.Wait(80, kNoDeadline, granting.As(1));
  const auto small = budget.Wait(20, kNoDeadline, granting.As(2));
  ASSERT_TRUE(large.ok() && small.ok());
  EXPECT_TRUE(budget.Leave(*large));
  ASSERT_EQ(granting.shares.size(), 1);
  EXPECT_EQ(granting.shares[0].first, 2);
  EXPECT_FALSE(budget.Leave(*large));
  EXPECT_FALSE(budget.Leave(*small));  // has been served
}

TEST(ByteBudgetTest, AFullLineIsAnErrorThatNamesTheFlag) {
  ByteBudget budget(100, 1, "--flag");
  Granting granting;
  EXPECT_FALSE(budget.IsShort());
  auto held = budget.TryTake(100);
  EXPECT_FALSE(budget.IsShort());
  ASSERT_TRUE(budget.Wait(10, kNoDeadline, granting.As(1)).ok());
  EXPECT_TRUE(budget.IsShort());
  const absl::Status full = budget.Wait(10, kNoDeadline, granting.As(2)).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(full.message(), "busy: 1 calls wait for memory already (--flag)");
  // Who comes while the line stands still is told to come back later and later.
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_GE(DetailsOf(budget.Wait(10, kNoDeadline, granting.As(2)).status()).retry_delay_ms, 60);
  EXPECT_GT(DetailsOf(full).retry_delay_ms.value_or(0), 0);
}

TEST(ByteBudgetTest, ADeadlineBeforeTheTurnIsRefusedExceptOfTheFirstInLine) {
  ByteBudget budget(100, 9, "--flag");
  Granting granting;
  auto held = budget.TryTake(100);
  const absl::Time past = absl::Now() - absl::Seconds(1);
  ASSERT_TRUE(budget.Wait(10, past, granting.As(1)).ok());
  EXPECT_EQ(budget.Wait(10, past, granting.As(2)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(budget.Wait(10, kNoDeadline, granting.As(3)).ok());
  held.reset();
  EXPECT_EQ(granting.shares.size(), 2);
}

TEST(ByteBudgetTest, ClosedTellsThoseInLineAndThoseWhoComeThen) {
  ByteBudget budget(100, 5, "--flag");
  Granting granting;
  auto held = budget.TryTake(100);
  for (const int number : {1, 2}) ASSERT_TRUE(budget.Wait(10, kNoDeadline, granting.As(number)).ok());
  budget.Close(Draining());
  ASSERT_EQ(granting.errors.size(), 2);
  EXPECT_EQ(DetailsOf(granting.errors[0]).reason, "DRAINING");
  EXPECT_EQ(budget.Wait(10, kNoDeadline, granting.As(3)).status(), Draining());
  held.reset();
  EXPECT_TRUE(granting.shares.empty());
}

TEST(ByteBudgetTest, FullTellsWhatIsHeld) {
  ByteBudget budget(100, 1, "--flag");
  auto held = budget.TryTake(70);
  EXPECT_EQ(budget.Full().message(), "busy: 70 bytes of calls are in flight (--flag)");
  EXPECT_TRUE(budget.IsShort());
}

TEST(ByteBudgetTest, ManyThreadsNeverHoldMoreThanTheBudget) {
  ByteBudget budget(100, 8000, "--flag");
  std::atomic<int64_t> held = 0, most = 0;
  std::atomic<int> granted = 0;
  const auto hold = [&](const absl::StatusOr<ByteBudget::Share>& share) {
    const int64_t bytes = share->bytes();
    const int64_t now = held.fetch_add(bytes) + bytes;
    for (int64_t seen = most.load(); now > seen && !most.compare_exchange_weak(seen, now);) {
    }
    ++granted;
    held.fetch_sub(bytes);
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 2000; ++i) {
        const int64_t bytes = (thread * 7 + i * 13) % 60 + 1;
        const auto ticket = budget.Wait(bytes, kNoDeadline, hold);
        ASSERT_TRUE(ticket.ok()) << ticket.status();
        if (i % 3 == 0 && budget.Leave(*ticket)) ++granted;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(granted, 8000);
  EXPECT_LE(most, 100);
  EXPECT_TRUE(budget.TryTake(100).has_value());
}

}  // namespace
}  // namespace layerd
