#include "lib/engine/admission_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/engine/cpu_engine.h"
#include "lib/layers/seeded.h"
#include "tests/lib/engine/held_engine.h"

namespace layerd {
namespace {

using Result = absl::StatusOr<NormalizeResult>;

std::shared_ptr<ByteBudget> Budget(int64_t bytes) { return std::make_shared<ByteBudget>(bytes, 0, "--flag"); }

class AdmissionEngineTest : public testing::Test {
 protected:
  static constexpr int64_t kRowBytes = 64;

  static NormalizeCall Norm(int64_t rows, absl::Duration timeout = absl::InfiniteDuration()) {
    NormalizeCall call;
    call.inputs.input = SeededInput(1, DType::kFloat32, {rows, kRowBytes / 4});
    call.context.deadline = absl::Now() + timeout;
    return call;
  }
  std::shared_ptr<std::optional<Result>> Send(NormalizeCall call) {
    auto answer = std::make_shared<std::optional<Result>>();
    engine_.Normalize(std::move(call), [answer](Result result) {
      EXPECT_FALSE(answer->has_value()) << "answered twice";
      *answer = std::move(result);
    });
    return answer;
  }
  static void ExpectBusy(const absl::Status& status, const char* text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
    EXPECT_EQ(DetailsOf(status).reason, "OVERLOADED");
    EXPECT_GE(DetailsOf(status).retry_delay_ms.value_or(-1), 1);
  }

  HeldEngine inner_;
  AdmissionEngine engine_{{.workers = 1}, Budget(10 * kRowBytes), inner_};
};

TEST_F(AdmissionEngineTest, AnswersAreBoundedUntilTheyAreLetGo) {
  const auto first = Send(Norm(6)), second = Send(Norm(4));
  const auto third = Send(Norm(1));
  ASSERT_TRUE(third->has_value());
  ExpectBusy((*third)->status(), "busy: 640 bytes of calls are in flight (--flag)");
  EXPECT_EQ(inner_.Answer(), "norm 6x16");
  EXPECT_EQ(inner_.Answer(), "norm 4x16");
  ASSERT_TRUE((*first)->ok() && (*second)->ok());
  ExpectBusy((*Send(Norm(1)))->status(), "busy: 640 bytes");
  second->reset();
  const auto fourth = Send(Norm(4));
  EXPECT_EQ(inner_.Answer(), "norm 4x16");
  EXPECT_TRUE((*fourth)->ok());
}

TEST_F(AdmissionEngineTest, AnErrorLetsItsRoomGo) {
  for (int i = 0; i < 3; ++i) {
    const auto answer = Send(Norm(10));
    EXPECT_EQ(inner_.Answer(absl::InternalError("broken")), "norm 10x16");
    EXPECT_EQ((*answer)->status().code(), absl::StatusCode::kInternal);
  }
}

TEST_F(AdmissionEngineTest, AnAnswerOutlivesTheEngine) {
  HeldEngine inner;
  std::optional<NormalizeResult> answer;
  {
    AdmissionEngine engine({}, Budget(1000), inner);
    engine.Normalize(Norm(1), [&](Result result) { answer = *std::move(result); });
    EXPECT_EQ(inner.Answer(), "norm 1x16");
  }
  EXPECT_NE(answer->held, nullptr);
  answer.reset();
}

TEST_F(AdmissionEngineTest, ACallThatWouldBeLateIsRefusedAtOnceAndSoIsOneThatIsNotReadYet) {
  CallContext soon{.deadline = absl::Now() + absl::Milliseconds(1200)};
  const auto alone = Send(Norm(1, absl::Milliseconds(1500)));  // whatever it takes: nobody is before it
  ASSERT_FALSE(alone->has_value());
  EXPECT_TRUE(engine_.CheckAdmission(soon).ok());
  const auto endless = Send(Norm(1));
  NormalizeCall heavy = Norm(1, absl::Milliseconds(1500));
  heavy.inputs.input = Tensor::WithoutData(DType::kFloat32, {2, 1 << 30});  // about a second at the rate supposed first
  AdmissionEngine engine({.workers = 1, .limits = {int64_t{1} << 40, 1e9}}, Budget(int64_t{1} << 40), inner_);
  NormalizeCall before = heavy;
  before.context.deadline = absl::Now() + absl::Seconds(1);
  std::optional<absl::Status> first, second;
  engine.Normalize(before, [&](const Result& result) { first = result.status(); });
  EXPECT_FALSE(first.has_value());
  engine.Normalize(heavy, [&](const Result& result) { second = result.status(); });
  ASSERT_TRUE(second.has_value());
  ExpectBusy(*second, "beside what was accepted before, and the deadline is in 1.");
  ExpectBusy(engine.CheckAdmission(soon), "and the deadline is in 1.");
  EXPECT_TRUE(engine.CheckAdmission({}).ok());
  for (int i = 0; i < 3; ++i) inner_.Answer(absl::InternalError("not computed"));
  EXPECT_TRUE(first.has_value());
  EXPECT_TRUE(engine.CheckAdmission(soon).ok());
}

TEST_F(AdmissionEngineTest, WhoIsGoneIsToldSo) {
  NormalizeCall call = Norm(1);
  call.context.cancelled = std::make_shared<std::atomic<bool>>(true);
  EXPECT_EQ(engine_.CheckAdmission(call.context).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ((*Send(call))->status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ((*Send(Norm(1, -absl::Seconds(1))))->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(inner_.count(), 0);
}

TEST_F(AdmissionEngineTest, BadCallsAndNamesAreErrors) {
  NormalizeCall call = Norm(1);
  call.spec.epsilon = -1;
  EXPECT_EQ((*Send(call))->status().code(), absl::StatusCode::kInvalidArgument);
  call = Norm(1);
  call.layer = "models/m/layers/l";
  EXPECT_EQ((*Send(call))->status().code(), absl::StatusCode::kNotFound);
}

// From many threads, with room for few answers: what is not refused is right.
TEST(AdmissionEngineThreadsTest, WhatIsAcceptedIsAnswered) {
  constexpr int64_t kDim = 64;
  CpuEngine cpu({.threads = 2, .queue_calls = 1000});
  AdmissionEngine engine({.workers = 2}, Budget(3 * 8 * kDim * 4), cpu);
  const Arena arena(1);
  NormalizeCall call;
  call.inputs.input = SeededInput(1, DType::kFloat32, {8, kDim});
  const auto expected = Normalize(arena, call.spec, call.inputs, std::nullopt, false);
  ASSERT_TRUE(expected.ok());
  std::atomic<int> right = 0, refused = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const auto result = Normalize(engine, call);
        if (result.ok()) {
          right += SameBits(result->outputs.output, expected->output);
        } else {
          refused += DetailsOf(result.status()).reason == "OVERLOADED";
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right + refused, 1200);
  EXPECT_GT(right, 0);
}

}  // namespace
}  // namespace layerd
