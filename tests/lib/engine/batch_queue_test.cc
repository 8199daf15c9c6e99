#include "lib/engine/batch_queue.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace layerd {
namespace {

using Clock = BatchQueue::Clock;

class NamedCall : public QueuedCall {
 public:
  NamedCall(std::string call_name, const BatchTraits& call_traits, CallContext call_context)
      : QueuedCall(call_traits), name(std::move(call_name)), context_(std::move(call_context)) {}
  const CallContext& context() const override { return context_; }
  void Fail(absl::Status) override {}
  void Compute(LayerEngine&, std::vector<BatchShare>, BatchDone) override {}

  const std::string name;

 private:
  const CallContext context_;
};

class BatchQueueTest : public testing::Test {
 protected:
  // Kinds are told apart by the address of their layer alone.
  BatchKind KindOf(char layer) const {
    return {reinterpret_cast<const PackedFeedForward*>(&layers_[static_cast<unsigned char>(layer)]), DType::kFloat32,
            DType::kFloat32, false};
  }

  // A call for the layer that its name begins with, due so many hours from now; 0: without a deadline.
  void Push(const std::string& name, int hours = 0, BatchTraits traits = {.rows = 1, .join_rows = 8},
            Clock::time_point ripe = Clock::time_point::min()) {
    if (traits.join_rows > 0) traits.kind = KindOf(name[0]);
    CallContext context;
    if (hours > 0) context.deadline = now_ + absl::Hours(hours);
    queue_.Push(std::make_unique<NamedCall>(name, traits, context), ripe);
  }

  // The names of the next turn's calls, with their rows where those are not all of them.
  std::string Pop(bool heavy_too = true) {
    std::string names;
    Batch batch = queue_.Pop(heavy_too);
    for (auto& [call, rows] : batch.shares) {
      absl::StrAppend(&names, names.empty() ? "" : " ", static_cast<NamedCall&>(*call).name);
      if (rows == call->traits.rows) continue;
      absl::StrAppend(&names, ":", rows);
      call->traits.rows -= rows;
      queue_.Push(std::move(call));
    }
    for (const auto& [call, error] : batch.unwanted) {
      absl::StrAppend(&names, " -", static_cast<NamedCall&>(*call).name);
    }
    return names;
  }

  const absl::Time now_ = absl::Now();
  BatchQueue queue_;

 private:
  char layers_[256] = {};
};

TEST_F(BatchQueueTest, CallsOfOneKindShareATurnUpToTheRowsOfABatch) {
  const BatchTraits three = {.rows = 3, .join_rows = 8};
  for (const char* name : {"a1", "b1", "a2", "a3", "a4"}) Push(name, 0, three);
  EXPECT_EQ(queue_.size(), 5);
  EXPECT_EQ(Pop(), "a1 a2");  // a third would make 9 rows
  EXPECT_EQ(Pop(), "b1");
  EXPECT_EQ(Pop(), "a3 a4");
  EXPECT_EQ(Pop(), "");
  EXPECT_EQ(queue_.size(), 0);
}

TEST_F(BatchQueueTest, CallsThatDifferInOneThingAreOfDifferentKinds) {
  BatchTraits traits = {.rows = 1, .join_rows = 8};
  const auto push = [&](const char* name, BatchKind kind) {
    traits.kind = kind;
    queue_.Push(std::make_unique<NamedCall>(name, traits, CallContext()));
  };
  BatchKind kind = KindOf('a');
  push("a", kind);
  kind.input_dtype = DType::kBFloat16;
  push("input", kind);
  kind = KindOf('a');
  kind.output_dtype = DType::kBFloat16;
  push("output", kind);
  kind = KindOf('a');
  kind.intermediates = true;
  push("inside", kind);
  push("b", KindOf('b'));
  for (const char* name : {"a", "input", "output", "inside", "b"}) EXPECT_EQ(Pop(), name);
}

TEST_F(BatchQueueTest, ACallOfNoKindHasATurnOfItsOwn) {
  for (const char* name : {"a1", "a2"}) Push(name, 0, {});
  EXPECT_EQ(Pop(), "a1");
  EXPECT_EQ(Pop(), "a2");
}

TEST_F(BatchQueueTest, TheEarliestDeadlineGoesFirstThenTheOldestCall) {
  Push("a", 0);
  Push("b", 3);
  Push("c", 1);
  Push("d", 3);
  Push("e", 0);
  EXPECT_EQ(Pop(), "c");
  EXPECT_EQ(Pop(), "b");
  EXPECT_EQ(Pop(), "d");
  EXPECT_EQ(Pop(), "a");
  EXPECT_EQ(Pop(), "e");
}

TEST_F(BatchQueueTest, WithinALayerTooTheEarliestDeadlineGoesFirst) {
  const BatchTraits four = {.rows = 4, .join_rows = 8};
  for (const auto& [name, hours] : {std::pair("a1", 0), {"a2", 3}, {"a3", 1}, {"a4", 2}}) Push(name, hours, four);
  EXPECT_EQ(Pop(), "a3 a4");
  EXPECT_EQ(Pop(), "a2 a1");
}

TEST_F(BatchQueueTest, LayersWithoutDeadlinesTakeTurns) {
  const BatchTraits full = {.rows = 8, .join_rows = 8};
  for (const char* name : {"a1", "a2", "a3", "b1", "b2", "c1"}) Push(name, 0, full);
  for (const char* name : {"a1", "b1", "c1", "a2", "b2", "a3"}) EXPECT_EQ(Pop(), name);
}

TEST_F(BatchQueueTest, NoDeadlinesOfOthersKeepALayerWaiting) {
  Push("b", 0);
  int turns = 0;
  for (; turns < 100; ++turns) {
    Push("a", 1);
    if (Pop() == "b") break;
  }
  EXPECT_EQ(turns, BatchQueue::kMostPassedOver);
}

TEST_F(BatchQueueTest, NoDeadlinesOfOthersKeepACallOfTheSameLayerWaiting) {
  const BatchTraits full = {.rows = 8, .join_rows = 8};
  Push("a-patient", 0, full);
  int turns = 0;
  for (; turns < 100; ++turns) {
    Push("a", 1, full);
    if (Pop() == "a-patient") break;
  }
  EXPECT_EQ(turns, BatchQueue::kMostPassedOver);
}

TEST_F(BatchQueueTest, HeavyOnesAreLeftOutOnRequestAndHaveTheirTurnAfter) {
  Push("a", 0, {.heavy = true, .rows = 1, .join_rows = 8});
  Push("b", 0);
  EXPECT_EQ(Pop(/*heavy_too=*/false), "b");
  EXPECT_EQ(Pop(/*heavy_too=*/false), "");
  EXPECT_EQ(Pop(), "a");
}

TEST_F(BatchQueueTest, LightCallsThatAreTakenMeanwhileDoNotMakeAHeavyLayerStarve) {
  const BatchTraits heavy = {.heavy = true, .rows = 1, .join_rows = 8};
  Push("b", 0, heavy);
  int turns = 0;
  for (; turns < 100; ++turns) {
    Push("a", 1, heavy);
    if (Pop() == "b") break;
    for (int i = 0; i < 5; ++i) {
      Push("light", 0);
      EXPECT_EQ(Pop(/*heavy_too=*/false), "light");
    }
  }
  EXPECT_EQ(turns, BatchQueue::kMostPassedOver);
}

TEST_F(BatchQueueTest, ACallToBeDividedIsTakenByPartsAndOthersGetInBetween) {
  const BatchTraits large = {.rows = 20, .join_rows = 8, .part_rows = 8};
  Push("a-large", 0, large);
  Push("b", 0);
  EXPECT_EQ(Pop(), "a-large:8");
  EXPECT_EQ(Pop(), "b");
  Push("a", 0);
  EXPECT_EQ(Pop(), "a-large:8");
  EXPECT_EQ(Pop(), "a a-large");  // what was left of it came back after the small one
  EXPECT_EQ(queue_.size(), 0);
}

TEST_F(BatchQueueTest, CallsThatNobodyWaitsForAreHandedOutWithTheirErrorAndTakeNoTurn) {
  auto cancelled = std::make_shared<std::atomic<bool>>(true);
  CallContext unwanted, late;
  unwanted.cancelled = cancelled;
  late.deadline = absl::InfinitePast();
  BatchTraits traits = {.kind = KindOf('a'), .rows = 1, .join_rows = 8};
  queue_.Push(std::make_unique<NamedCall>("cancelled", traits, unwanted));
  Push("a", 0);
  queue_.Push(std::make_unique<NamedCall>("late", BatchTraits(), late));
  Batch batch = queue_.Pop(true);
  ASSERT_EQ(batch.unwanted.size(), 2u);
  EXPECT_EQ(static_cast<NamedCall&>(*batch.unwanted[0].first).name, "late");
  EXPECT_EQ(batch.unwanted[0].second.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(static_cast<NamedCall&>(*batch.unwanted[1].first).name, "cancelled");
  EXPECT_EQ(batch.unwanted[1].second.code(), absl::StatusCode::kCancelled);
  ASSERT_EQ(batch.shares.size(), 1u);
  EXPECT_EQ(static_cast<NamedCall&>(*batch.shares[0].call).name, "a");
  EXPECT_EQ(queue_.size(), 0);
}

TEST_F(BatchQueueTest, CallsWaitForCompanyUntilTheyAreRipeOrABatchIsFull) {
  const Clock::time_point early = Clock::now(), later = early + std::chrono::hours(1);
  const BatchTraits three = {.rows = 3, .join_rows = 8};
  Push("a1", 0, three, later);
  Push("b1", 0, three, early);
  EXPECT_EQ(Pop(), "");
  EXPECT_EQ(queue_.NextRipe(), early);
  queue_.Ripen(early);
  EXPECT_EQ(Pop(), "b1");
  EXPECT_EQ(queue_.NextRipe(), later);
  Push("a2", 0, three, later + std::chrono::hours(1));  // the first call's time counts
  EXPECT_EQ(Pop(), "");
  EXPECT_EQ(queue_.NextRipe(), later);
  Push("a3", 0, three, later);
  EXPECT_EQ(queue_.NextRipe(), std::nullopt);
  EXPECT_EQ(Pop(), "a1 a2");
  EXPECT_EQ(Pop(), "a3");  // what is left has waited
}

}  // namespace
}  // namespace layerd
