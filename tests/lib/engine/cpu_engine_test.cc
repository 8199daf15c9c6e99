#include "lib/engine/cpu_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "lib/base/errors.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

NormalizeCall SmallNorm() {
  NormalizeCall call;
  call.inputs.input = SeededInput(1, DType::kFloat32, {2, 16});
  return call;
}

FeedForwardCall SmallLayer(int64_t rows = 2) {
  FeedForwardCall call;
  call.input = SeededInput(1, DType::kFloat32, {rows, 16});
  call.weights = SeededFeedForwardWeights(1, call.spec, DType::kFloat32, 16, 24, false);
  return call;
}

// Holds the only worker of an engine until it is let go.
class Blocker {
 public:
  explicit Blocker(CpuEngine& engine) {
    std::promise<void> started;
    engine.Normalize(SmallNorm(), [this, &started](absl::StatusOr<NormalizeResult>) {
      started.set_value();
      release_.get_future().wait();
    });
    started.get_future().wait();
  }
  void Release() { release_.set_value(); }

 private:
  std::promise<void> release_;
};

TEST(CpuEngineTest, FullQueueRefusesWithADelay) {
  CpuEngine engine({.threads = 1, .queue_calls = 2});
  Blocker blocker(engine);
  std::vector<std::future<absl::Status>> waiting;
  for (int i = 0; i < 2; ++i) {
    auto promise = std::make_shared<std::promise<absl::Status>>();
    waiting.push_back(promise->get_future());
    engine.Normalize(SmallNorm(), [promise](absl::StatusOr<NormalizeResult> r) { promise->set_value(r.status()); });
  }
  const absl::Status refused = Normalize(engine, SmallNorm()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, "OVERLOADED");
  EXPECT_GE(DetailsOf(refused).retry_delay_ms.value_or(-1), 1);
  blocker.Release();
  for (auto& one : waiting) EXPECT_TRUE(one.get().ok());
  EXPECT_TRUE(Normalize(engine, SmallNorm()).ok());
}

TEST(CpuEngineTest, CallsThatExpiredOrWereCancelledWhileTheyWaitedAreNotBegun) {
  CpuEngine engine({.threads = 1});
  Blocker blocker(engine);
  NormalizeCall late = SmallNorm();
  late.context.deadline = absl::Now() + absl::Milliseconds(20);
  FeedForwardCall unwanted = SmallLayer();
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  unwanted.context.cancelled = cancelled;
  std::promise<absl::Status> late_status, unwanted_status;
  engine.Normalize(std::move(late), [&](absl::StatusOr<NormalizeResult> r) { late_status.set_value(r.status()); });
  engine.FeedForward(std::move(unwanted),
                     [&](absl::StatusOr<FeedForwardResult> r) { unwanted_status.set_value(r.status()); });
  cancelled->store(true);
  absl::SleepFor(absl::Milliseconds(30));
  blocker.Release();
  EXPECT_EQ(late_status.get_future().get().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(unwanted_status.get_future().get().code(), absl::StatusCode::kCancelled);
}

TEST(CpuEngineTest, ExpiredCallsAreRefusedOnArrival) {
  CpuEngine engine({.threads = 1});
  NormalizeCall call = SmallNorm();
  call.context.deadline = absl::InfinitePast();
  EXPECT_EQ(DetailsOf(Normalize(engine, std::move(call)).status()).reason, "EXPIRED_WHILE_WAITING");
}

TEST(CpuEngineTest, SmallCallsAreComputedByTheThreadThatBringsThem) {
  CpuEngine engine({.threads = 1, .at_once_work = 1 << 16});
  const std::thread::id here = std::this_thread::get_id();
  std::thread::id norm, layer, nested, large;
  std::promise<void> nested_answered, large_answered;
  engine.Normalize(SmallNorm(), [&](const absl::StatusOr<NormalizeResult>& result) {
    EXPECT_TRUE(result.ok());
    norm = std::this_thread::get_id();
    // One after another, calls from inside `done` would pile up on the stack.
    engine.Normalize(SmallNorm(), [&](const absl::StatusOr<NormalizeResult>&) {
      nested = std::this_thread::get_id();
      nested_answered.set_value();
    });
  });
  EXPECT_EQ(norm, here);
  nested_answered.get_future().wait();
  EXPECT_NE(nested, here);
  engine.FeedForward(SmallLayer(),
                     [&](const absl::StatusOr<FeedForwardResult>&) { layer = std::this_thread::get_id(); });
  EXPECT_EQ(layer, here);
  engine.FeedForward(SmallLayer(100), [&](const absl::StatusOr<FeedForwardResult>&) {
    large = std::this_thread::get_id();
    large_answered.set_value();
  });
  large_answered.get_future().wait();
  EXPECT_NE(large, here);
}

TEST(CpuEngineTest, HasNoLayersOfItsOwn) {
  CpuEngine engine({.threads = 1});
  NormalizeCall norm = SmallNorm();
  norm.layer = "models/m/layers/l";
  FeedForwardCall layer = SmallLayer();
  layer.layer = norm.layer;
  for (const absl::Status& status : {Normalize(engine, norm).status(), FeedForward(engine, layer).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(DetailsOf(status).reason, "LAYER_NOT_FOUND");
    EXPECT_EQ(DetailsOf(status).field, "layer");
    EXPECT_EQ(DetailsOf(status).resource_name, "models/m/layers/l");
  }
}

TEST(CpuEngineTest, AnswersThatCannotFitAreRefusedByTheirFlag) {
  CpuEngine engine({.threads = 1, .max_answer_bytes = 1000});
  EXPECT_TRUE(FeedForward(engine, SmallLayer(15)).ok());
  const absl::Status status = FeedForward(engine, SmallLayer(16)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(status.message()).find("--max_message_mib"), std::string::npos);
  EXPECT_EQ(DetailsOf(status).retry_delay_ms, -1);
  FeedForwardCall inside = SmallLayer(3);
  EXPECT_TRUE(FeedForward(engine, inside).ok());
  inside.intermediates = true;
  EXPECT_EQ(DetailsOf(FeedForward(engine, inside).status()).reason, "ANSWER_TOO_LARGE");
}

// Memory of the caller's takes any number of rows; a row is bounded as ever, and so is what comes beside it.
TEST(CpuEngineTest, OutputsThatGoElsewhereMayHaveAnyNumberOfRows) {
  CpuEngine engine({.threads = 1, .max_answer_bytes = 1000});
  Tensor memory = Tensor::Allocate(DType::kFloat32, {100000});
  const MemoryPlace place{std::shared_ptr<std::byte>(std::shared_ptr<void>(), memory.mutable_data()), 400000};
  FeedForwardCall layer = SmallLayer(16);
  layer.output_memory = place;
  EXPECT_TRUE(FeedForward(engine, layer).ok());
  layer.intermediates = true;
  EXPECT_EQ(DetailsOf(FeedForward(engine, layer).status()).reason, "ANSWER_TOO_LARGE");
  NormalizeCall norm;
  norm.output_memory = place;
  norm.inputs.input = SeededInput(1, DType::kFloat32, {100, 250});
  EXPECT_TRUE(Normalize(engine, norm).ok());
  norm.inputs.input = SeededInput(1, DType::kFloat32, {1, 251});
  EXPECT_EQ(DetailsOf(Normalize(engine, norm).status()).reason, "ANSWER_TOO_LARGE");
  norm.inputs.input = SeededInput(1, DType::kFloat32, {100, 250});
  norm.inputs.residual = norm.inputs.input;
  EXPECT_EQ(DetailsOf(Normalize(engine, norm).status()).reason, "ANSWER_TOO_LARGE");
}

TEST(CpuEngineTest, LayersTooLargeToVerifyAreRefusedByTheirFlag) {
  CpuEngine engine({.threads = 1, .max_verify_flops = 1000});
  FeedForwardCall call = SmallLayer();
  EXPECT_TRUE(FeedForward(engine, call).ok());
  call.verify = true;
  const absl::Status status = FeedForward(engine, call).status();
  EXPECT_EQ(DetailsOf(status).reason, "VERIFY_TOO_LARGE");
  EXPECT_NE(std::string(status.message()).find("--max_verify_flops"), std::string::npos);
}

TEST(CpuEngineTest, TheDestructorFinishesWhatWasAccepted) {
  std::atomic<int> answered = 0;
  {
    CpuEngine engine({.threads = 2});
    for (int i = 0; i < 100; ++i) {
      engine.FeedForward(SmallLayer(), [&](absl::StatusOr<FeedForwardResult> r) { answered += r.ok(); });
    }
  }
  EXPECT_EQ(answered, 100);
}

TEST(CpuEngineTest, ManyCallersGetEachTheirOwnAnswer) {
  CpuEngine engine({.threads = 2, .queue_calls = 10000});
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  for (int caller = 0; caller < 16; ++caller) {
    callers.emplace_back([&, caller] {
      FeedForwardCall call = SmallLayer();
      call.input = SeededInput(static_cast<uint64_t>(caller), DType::kFloat32, {3, 16});
      const auto first = FeedForward(engine, call);
      for (int i = 0; i < 20; ++i) {
        const auto again = FeedForward(engine, call);
        if (!first.ok() || !again.ok() || !SameBits(first->outputs.output, again->outputs.output)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace layerd
