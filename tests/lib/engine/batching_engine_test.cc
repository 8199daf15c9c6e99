// Which calls reach the inner engine, when, and what becomes of the answers. Order: batch_queue_test.cc; the same bits from
// many threads: batching_bits_test.cc.
#include "lib/engine/batching_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "tests/lib/engine/held_engine.h"

namespace layerd {
namespace {

constexpr int64_t kDim = 16, kHiddenDim = 24;

std::shared_ptr<const PackedFeedForward> SeededLayer(uint64_t seed) {
  FeedForwardSpec spec = SwiGluSpec();
  spec.inner_norm = InnerNorm{};
  const Arena arena(1);
  return std::make_shared<const PackedFeedForward>(PackedFeedForward::Of(
      arena, spec, SeededFeedForwardWeights(seed, spec, DType::kFloat32, kDim, kHiddenDim, false)));
}

using Result = absl::StatusOr<FeedForwardResult>;

class BatchingEngineTest : public testing::Test {
 protected:
  // One heavy layer at a time, batches of 8 rows, and calls of more than 8 rows divided.
  void Start(BatchingEngineOptions options = {.workers = 2}) {
    options.sizes.batch_rows = 8;
    options.sizes.heavy_weights = heavy_weights_;
    options.sizes.least_part_work = 0;
    engine_ = std::make_unique<BatchingEngine>(options, inner_);
  }

  static FeedForwardCall CallOf(const std::shared_ptr<const PackedFeedForward>& layer, int64_t rows,
                                uint64_t seed = 1) {
    FeedForwardCall call;
    call.spec = layer->spec();
    call.weights = layer->outline();
    call.packed = layer;
    call.input = SeededInput(seed, DType::kFloat32, {rows, kDim});
    return call;
  }
  static NormalizeCall Norm(int64_t rows = 1) {
    NormalizeCall call;
    call.inputs.input = SeededInput(1, DType::kFloat32, {rows, kDim});
    return call;
  }

  using Answers = std::vector<std::shared_ptr<std::optional<Result>>>;

  // Answers arrive in place: each call's slot is filled when `done` is called, once.
  std::shared_ptr<std::optional<Result>> Send(FeedForwardCall call) {
    auto answer = std::make_shared<std::optional<Result>>();
    engine_->FeedForward(std::move(call), [answer](Result result) {
      EXPECT_FALSE(answer->has_value()) << "answered twice";
      *answer = std::move(result);
    });
    return answer;
  }

  Answers SendAll(const std::vector<FeedForwardCall>& calls) {
    Answers answers;
    answers.reserve(calls.size());
    for (const FeedForwardCall& call : calls) answers.push_back(Send(call));
    return answers;
  }

  static void ExpectAnswer(const std::optional<Result>& answer, const FeedForwardCall& call) {
    ASSERT_TRUE(answer.has_value());
    ASSERT_TRUE(answer->ok()) << answer->status();
    const Arena arena(1);
    const auto expected = layerd::FeedForward(arena, *call.packed, call.input, call.output_dtype, call.intermediates);
    EXPECT_TRUE(SameBits((*answer)->outputs.output, expected->output));
    const auto same = [](const std::optional<Tensor>& got, const std::optional<Tensor>& wanted) {
      ASSERT_EQ(got.has_value(), wanted.has_value());
      if (got) {
        EXPECT_TRUE(SameBits(*got, *wanted));
      }
    };
    same((*answer)->outputs.gate, expected->gate);
    same((*answer)->outputs.up, expected->up);
    same((*answer)->outputs.hidden, expected->hidden);
    same((*answer)->outputs.normed, expected->normed);
    EXPECT_EQ((*answer)->layer_hash, "hash");
  }
  static void ExpectError(const std::optional<Result>& answer, absl::StatusCode code) {
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->status().code(), code) << answer->status();
  }

  const std::shared_ptr<const PackedFeedForward> a_ = SeededLayer(1), b_ = SeededLayer(2);
  int64_t heavy_weights_ = 1;
  HeldEngine inner_;
  std::unique_ptr<BatchingEngine> engine_;
};

TEST_F(BatchingEngineTest, ACallThatFindsRoomIsPassedOnAtOnceAsItIs) {
  Start();
  FeedForwardCall call = CallOf(a_, 6);
  call.input = call.input.Reshaped({2, 3, kDim});
  call.context.deadline = absl::Now() + absl::Hours(1);
  call.context.cancelled = std::make_shared<std::atomic<bool>>(false);
  const auto answer = Send(call);
  ASSERT_EQ(inner_.count(), 1);
  auto held = inner_.Take();
  EXPECT_EQ(held.input.shape(), (Shape{2, 3, kDim}));
  EXPECT_EQ(held.input.data(), call.input.data());
  EXPECT_EQ(held.context.deadline, call.context.deadline);
  EXPECT_EQ(held.context.cancelled, call.context.cancelled);
  held.answer(absl::OkStatus());
  ExpectAnswer(*answer, call);
}

TEST_F(BatchingEngineTest, CallsThatComeMeanwhileBecomeOne) {
  Start();
  std::vector<FeedForwardCall> calls = {CallOf(a_, 1, 1), CallOf(a_, 2, 2), CallOf(a_, 1, 3), CallOf(a_, 3, 4)};
  calls[2].input = calls[2].input.Reshaped({kDim});
  calls[3].input = calls[3].input.Reshaped({3, 1, kDim});
  calls[1].context.deadline = absl::Now() + absl::Hours(1);
  const Answers answers = SendAll(calls);
  EXPECT_EQ(inner_.Answer(), "1x16");
  auto joint = inner_.Take();
  EXPECT_EQ(joint.input.shape(), (Shape{6, kDim}));
  EXPECT_EQ(joint.context.deadline, absl::InfiniteFuture());  // the latest of them
  joint.answer(absl::OkStatus());
  for (size_t i = 0; i < calls.size(); ++i) ExpectAnswer(*answers[i], calls[i]);
  // Whoever holds one of the answers does not hold the others.
  EXPECT_NE((**answers[1])->outputs.output.data() + 2 * kDim * 4, (**answers[2])->outputs.output.data());
}

TEST_F(BatchingEngineTest, AJointCallIsWantedUntilTheLastOfItsDeadlines) {
  Start({.workers = 1});
  std::vector<FeedForwardCall> calls(7, CallOf(a_, 1));
  // The patient one has waited longest, and is passed over three times: it is not the last.
  for (size_t i = 2; i < calls.size(); ++i) calls[i].context.deadline = absl::Now() + absl::Hours(1);
  const Answers answers = SendAll(calls);
  EXPECT_EQ(inner_.Answer(), "1x16");
  auto joint = inner_.Take();
  EXPECT_EQ(joint.input.dim(0), 6);
  EXPECT_EQ(joint.context.deadline, absl::InfiniteFuture());
  EXPECT_EQ(joint.context.cancelled, nullptr);
  joint.answer(absl::OkStatus());
  for (size_t i = 0; i < calls.size(); ++i) ExpectAnswer(*answers[i], calls[i]);
}

TEST_F(BatchingEngineTest, ValuesInsideAreSplitTooAndOutputDtypesKept) {
  Start();
  std::vector<FeedForwardCall> calls;
  Answers answers;
  for (int i = 0; i < 5; ++i) {
    calls.push_back(CallOf(a_, 2, static_cast<uint64_t>(i)));
    calls.back().intermediates = true;
    calls.back().output_dtype = DType::kBFloat16;
    answers.push_back(Send(calls.back()));
  }
  EXPECT_EQ(inner_.Answer(), "2x16");
  EXPECT_EQ(inner_.Answer(), "8x16");
  for (int i = 0; i < 5; ++i) ExpectAnswer(*answers[i], calls[i]);
}

TEST_F(BatchingEngineTest, CallsThatAskForDifferentThingsAreNotJoined) {
  Start({.workers = 1});
  std::vector<FeedForwardCall> calls(6, CallOf(a_, 1));
  calls[1].input = SeededInput(1, DType::kBFloat16, {1, kDim});
  calls[2].output_dtype = DType::kFloat16;
  calls[3].intermediates = true;
  calls[4].verify = true;
  calls[5] = CallOf(b_, 1);
  const auto first = Send(calls[0]);
  const Answers answers = SendAll(calls);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.count(), 0);
  for (size_t i = 0; i < calls.size(); ++i) ExpectAnswer(*answers[i], calls[i]);
  ExpectAnswer(*first, calls[0]);
}

TEST_F(BatchingEngineTest, OnlyOneHeavyLayerAtATimeAndLightCallsBesideIt) {
  Start({.workers = 2});
  const auto heavy = Send(CallOf(a_, 1)), waiting = Send(CallOf(b_, 1));
  EXPECT_EQ(inner_.count(), 1);
  std::optional<absl::StatusOr<NormalizeResult>> norm;
  engine_->Normalize(Norm(), [&](absl::StatusOr<NormalizeResult> result) { norm = std::move(result); });
  EXPECT_EQ(inner_.count(), 2);  // a worker is free: it does not wait, though another call waits
  const auto held = Send(CallOf(b_, 1));
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.Answer(), "norm 1x16");
  EXPECT_EQ(inner_.Answer(), "2x16");
  EXPECT_TRUE(norm.has_value() && norm->ok());
  EXPECT_TRUE(heavy->has_value() && waiting->has_value() && held->has_value());
}

TEST_F(BatchingEngineTest, LightLayersHaveAllWorkers) {
  heavy_weights_ = 1 << 20;
  Start({.workers = 2});
  Answers answers = SendAll(std::vector(5, CallOf(a_, 1)));
  EXPECT_EQ(inner_.count(), 2);
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.Answer(), "3x16");
  for (const auto& answer : answers) EXPECT_TRUE(answer->has_value() && (*answer)->ok());
}

TEST_F(BatchingEngineTest, ALargeCallIsDividedAndSmallOnesGetIn) {
  Start({.workers = 1});
  FeedForwardCall large = CallOf(a_, 20, 7), small = CallOf(b_, 1), same = CallOf(a_, 2, 9);
  large.input = large.input.Reshaped({4, 5, kDim});
  large.intermediates = same.intermediates = true;
  const auto large_answer = Send(large), small_answer = Send(small), same_answer = Send(same);
  EXPECT_EQ(inner_.Answer(), "8x16");
  EXPECT_EQ(inner_.Answer(), "1x16");
  ExpectAnswer(*small_answer, small);
  EXPECT_EQ(inner_.Answer(), "8x16");  // two rows of another call, and six of this one
  ExpectAnswer(*same_answer, same);
  EXPECT_FALSE(large_answer->has_value());
  EXPECT_EQ(inner_.Answer(), "6x16");
  ExpectAnswer(*large_answer, large);
}

TEST_F(BatchingEngineTest, APartThatFailsEndsItsCallAndTheRestIsDropped) {
  Start({.workers = 1});
  const auto answer = Send(CallOf(a_, 20));
  EXPECT_EQ(inner_.Answer(), "8x16");
  EXPECT_EQ(inner_.Answer(InternalError("part")), "8x16");
  ExpectError(*answer, absl::StatusCode::kInternal);
  EXPECT_EQ(inner_.count(), 0);
  const auto next = Send(CallOf(a_, 1));
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_TRUE((*next)->ok());
}

TEST_F(BatchingEngineTest, ADividedCallThatIsCancelledBetweenItsPartsIsGivenUp) {
  Start({.workers = 1});
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  FeedForwardCall large = CallOf(a_, 20);
  large.context.cancelled = cancelled;
  const auto answer = Send(large);
  *cancelled = true;
  EXPECT_EQ(inner_.Answer(), "8x16");
  ExpectError(*answer, absl::StatusCode::kCancelled);
  EXPECT_EQ(inner_.count(), 0);
}

TEST_F(BatchingEngineTest, WaitingCallsThatNobodyWantsAreNotBegun) {
  Start({.workers = 1});
  const auto first = Send(CallOf(a_, 1));
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  std::vector<FeedForwardCall> calls(3, CallOf(a_, 1));
  calls[0].context.cancelled = cancelled;
  calls[2].context.cancelled = cancelled;
  const auto gone = Send(calls[0]), wanted = Send(calls[1]), gone_too = Send(calls[2]);
  *cancelled = true;
  EXPECT_EQ(inner_.Answer(), "1x16");
  ExpectError(*gone, absl::StatusCode::kCancelled);
  ExpectError(*gone_too, absl::StatusCode::kCancelled);
  EXPECT_EQ(inner_.Answer(), "1x16");
  ExpectAnswer(*wanted, calls[1]);
  // And where nobody wants anything, nothing is begun.
  const auto busy = Send(CallOf(a_, 1)), unwanted = Send(calls[0]);
  ExpectError(*unwanted, absl::StatusCode::kCancelled);  // on arrival
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.count(), 0);
}

TEST_F(BatchingEngineTest, AJointCallThatFailsIsTriedAgainOneByOne) {
  Start({.workers = 1});
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  std::vector<FeedForwardCall> calls;
  Answers answers;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(CallOf(a_, 1, static_cast<uint64_t>(i)));
    if (i == 2) calls.back().context.cancelled = cancelled;
    answers.push_back(Send(calls.back()));
  }
  EXPECT_EQ(inner_.Answer(), "1x16");
  *cancelled = true;
  auto joint = inner_.Take();
  EXPECT_EQ(joint.input.dim(0), 3);
  *cancelled = true;
  joint.answer(OutOfMemory());
  ExpectError(*answers[2], absl::StatusCode::kCancelled);
  EXPECT_FALSE(answers[1]->has_value());
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.Answer(InternalError("its own")), "1x16");
  ExpectAnswer(*answers[1], calls[1]);
  ExpectError(*answers[3], absl::StatusCode::kInternal);
  EXPECT_EQ(inner_.count(), 0);
}

TEST_F(BatchingEngineTest, ACallThatDoesNotFitIsRefusedBeforeItJoins) {
  Start({.workers = 1});
  const auto first = Send(CallOf(a_, 1));
  FeedForwardCall wide = CallOf(a_, 1), whole = CallOf(a_, 1), huge = CallOf(a_, (1 << 20) + 1);
  wide.input = SeededInput(1, DType::kFloat32, {1, kDim + 1});
  whole.input = Tensor::FromFloats(DType::kInt8, {1, kDim}, std::vector<float>(kDim));
  ExpectError(*Send(wide), absl::StatusCode::kInvalidArgument);
  ExpectError(*Send(whole), absl::StatusCode::kInvalidArgument);
  const auto too_large = Send(huge);
  ExpectError(*too_large, absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf((*too_large)->status()).reason, "ANSWER_TOO_LARGE");
  FeedForwardCall named = CallOf(a_, 1);
  named.layer = "models/m/layers/l";
  ExpectError(*Send(named), absl::StatusCode::kNotFound);
  // No float comes out of int8, and the check does not look at it: such a call is computed alone.
  FeedForwardCall narrow = CallOf(a_, 1), good = CallOf(a_, 1);
  narrow.output_dtype = DType::kInt8;
  const auto narrow_answer = Send(narrow), good_answer = Send(good);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(inner_.Answer(), "1x16");
  ExpectError(*narrow_answer, absl::StatusCode::kInvalidArgument);
  ExpectAnswer(*good_answer, good);
}

TEST_F(BatchingEngineTest, ABatchHasNoAnswerOverTheLimitOfOne) {
  BatchingEngineOptions options = {.workers = 1};
  options.sizes.limits.max_answer_bytes = 3 * kDim * 4 + 1;
  Start(options);
  Answers answers = SendAll(std::vector(6, CallOf(a_, 1)));
  for (const char* rows : {"1x16", "3x16", "2x16"}) EXPECT_EQ(inner_.Answer(), rows);
  for (const auto& answer : answers) EXPECT_TRUE((*answer)->ok());
}

TEST_F(BatchingEngineTest, AFullQueueRefusesWithADelay) {
  Start({.workers = 1, .queue_calls = 2});
  Answers answers = SendAll(std::vector(3, CallOf(a_, 1)));
  const auto refused = Send(CallOf(a_, 1));
  ExpectError(*refused, absl::StatusCode::kResourceExhausted);
  FeedForwardCall patient = CallOf(b_, 1);
  patient.context.waits = true;
  answers.push_back(Send(patient));
  EXPECT_EQ(DetailsOf((*refused)->status()).reason, "OVERLOADED");
  EXPECT_GE(DetailsOf((*refused)->status()).retry_delay_ms.value_or(-1), 1);
  EXPECT_EQ(inner_.Answer(), "1x16");
  answers.push_back(Send(CallOf(a_, 1)));  // the two have left the queue
  EXPECT_EQ(inner_.Answer(), "2x16");
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.Answer(), "1x16");
  for (const auto& answer : answers) EXPECT_TRUE((*answer)->ok());
}

TEST_F(BatchingEngineTest, WhoIsGoneLeavesAFullQueue) {
  Start({.workers = 1, .queue_calls = 2});
  const auto running = Send(CallOf(a_, 1));
  FeedForwardCall leaving = CallOf(a_, 1);
  const auto gone = std::make_shared<std::atomic<bool>>(false);
  leaving.context.cancelled = gone;
  const Answers waiting = SendAll({leaving, CallOf(b_, 1)});
  *gone = true;
  EXPECT_TRUE(engine_->CheckAdmission({}).ok());
  ExpectError(*waiting[0], absl::StatusCode::kCancelled);
  const auto late = Send(CallOf(a_, 1));
  EXPECT_FALSE(late->has_value());
  EXPECT_EQ(engine_->CheckAdmission({}).code(), absl::StatusCode::kResourceExhausted);
  for (int i = 0; i < 3; ++i) inner_.Answer();
  for (const auto& answer : {running, waiting[1], late}) EXPECT_TRUE((*answer)->ok());
}

TEST_F(BatchingEngineTest, ALightCallThatFindsAWorkerIsNotRefusedForAQueueOfHeavyOnes) {
  Start({.workers = 2, .queue_calls = 1});
  const auto running = Send(CallOf(a_, 1)), waiting = Send(CallOf(a_, 1));
  ExpectError(*Send(CallOf(a_, 1)), absl::StatusCode::kResourceExhausted);
  bool ok = false;
  engine_->Normalize(Norm(), [&](const absl::StatusOr<NormalizeResult>& result) { ok = result.ok(); });
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(inner_.Answer(), "norm 1x16");
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_TRUE(ok && running->has_value() && waiting->has_value());
}

TEST_F(BatchingEngineTest, AnswersAreGivenOutBeforeTheNextTurnSoThatTheirCallersAreInTime) {
  Start({.workers = 1});
  std::shared_ptr<std::optional<Result>> second;
  bool first_answered = false;
  engine_->FeedForward(CallOf(a_, 1), [&](const Result& result) {
    first_answered = result.ok();
    second = Send(CallOf(a_, 1));
    EXPECT_EQ(inner_.count(), 0);
  });
  const auto waiting = Send(CallOf(a_, 1));
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_TRUE(first_answered);
  EXPECT_EQ(inner_.Answer(), "2x16");
  EXPECT_TRUE(second->has_value() && waiting->has_value());
}

// An engine that answers at once, on the calling thread, and knows how deep its calls are nested.
class InstantEngine : public LayerEngine {
 public:
  void Normalize(NormalizeCall, NormalizeDone done) override {
    deepest = std::max(deepest, ++depth);
    done(NormalizeResult());
    --depth;
  }
  void FeedForward(FeedForwardCall, FeedForwardDone done) override { done(FeedForwardResult()); }
  int depth = 0, deepest = 0;
};

TEST_F(BatchingEngineTest, AQueueOfCallsThatAreAnsweredAtOnceDoesNotPileUpOnTheStack) {
  InstantEngine instant;
  BatchingEngine engine({.workers = 1, .queue_calls = 1000}, instant);
  int answered = 0;
  engine.Normalize(Norm(), [&](const absl::StatusOr<NormalizeResult>&) {
    for (int i = 0; i < 1000; ++i) {
      engine.Normalize(Norm(), [&](const absl::StatusOr<NormalizeResult>&) { ++answered; });
    }
    EXPECT_EQ(answered, 0);
  });
  EXPECT_EQ(answered, 1000);
  EXPECT_LE(instant.deepest, 2);
}

TEST_F(BatchingEngineTest, WithADelayCallsWaitForCompanyThoughAWorkerIsFree) {
  Start({.workers = 2, .batch_delay = absl::Hours(1)});
  Answers answers = SendAll(std::vector(7, CallOf(a_, 1)));
  EXPECT_EQ(inner_.count(), 0);
  bool ok = false;
  engine_->Normalize(Norm(), [&](const absl::StatusOr<NormalizeResult>& result) { ok = result.ok(); });
  EXPECT_EQ(inner_.Answer(), "norm 1x16");  // it has no company to wait for
  answers.push_back(Send(CallOf(a_, 1)));
  EXPECT_EQ(inner_.Answer(), "8x16");  // a batch is full
  for (const auto& answer : answers) EXPECT_TRUE((*answer)->ok());
  EXPECT_TRUE(ok);
}

TEST_F(BatchingEngineTest, TheDelayEnds) {
  Start({.workers = 1, .batch_delay = absl::Microseconds(100)});
  const FeedForwardCall call = CallOf(a_, 1);
  const auto answer = Send(call);
  EXPECT_EQ(inner_.Answer(), "1x16");  // waits for it
  ExpectAnswer(*answer, call);
}

TEST_F(BatchingEngineTest, CallsThatWaitForCompanyCountInTheQueue) {
  Start({.workers = 1, .queue_calls = 2, .batch_delay = absl::Hours(1)});
  const auto first = Send(CallOf(a_, 1)), second = Send(CallOf(b_, 1));
  ExpectError(*Send(CallOf(a_, 1)), absl::StatusCode::kResourceExhausted);
  std::thread inner([this] {
    EXPECT_EQ(inner_.Answer(), "1x16");
    EXPECT_EQ(inner_.Answer(), "1x16");
  });
  engine_.reset();  // does not wait for an hour
  inner.join();
  EXPECT_TRUE((*first)->ok());
  EXPECT_TRUE((*second)->ok());
}

TEST_F(BatchingEngineTest, TheDestructorFinishesWhatWasAccepted) {
  Start({.workers = 1});
  Answers answers;
  answers.push_back(Send(CallOf(a_, 20)));
  for (int i = 0; i < 10; ++i) answers.push_back(Send(CallOf(i % 2 == 0 ? a_ : b_, 3)));
  std::atomic<bool> gone = false;
  std::thread inner([&] {
    while (!gone) inner_.count() > 0 ? void(inner_.Answer()) : std::this_thread::yield();
  });
  engine_.reset();
  gone = true;
  inner.join();
  for (const auto& answer : answers) {
    ASSERT_TRUE(answer->has_value());
    EXPECT_TRUE((*answer)->ok());
  }
}

}  // namespace
}  // namespace layerd
