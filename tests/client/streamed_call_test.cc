// Calls that RemoteEngine sends as streams: the same answers as in one message, and no others from servers that err.
#include "client/streamed_call.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "client/remote_engine.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "tests/client/stream_servers.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

constexpr int64_t kNever = int64_t{1} << 62;

// All calls as streams, in chunks of about so many bytes.
RemoteEngineOptions Streams(const std::string& target, int64_t chunk_bytes) {
  return {.target = target, .stream_from_bytes = 0, .stream_chunk_bytes = chunk_bytes};
}

void ExpectSame(const std::optional<Tensor>& got, const std::optional<Tensor>& expected) {
  ASSERT_EQ(got.has_value(), expected.has_value());
  if (got) {
    EXPECT_TRUE(SameBits(*got, *expected)) << ToString(got->shape()) << " and " << ToString(expected->shape());
  }
}

void ExpectSame(const std::optional<ErrorReport>& got, const std::optional<ErrorReport>& expected) {
  ASSERT_TRUE(got && expected);
  EXPECT_EQ(got->max_abs_error, expected->max_abs_error);
  EXPECT_EQ(got->max_rel_error, expected->max_rel_error);
  EXPECT_EQ(got->max_ulp_error, expected->max_ulp_error);
  EXPECT_EQ(got->within_contract, expected->within_contract);
  ASSERT_EQ(got->stages.size(), expected->stages.size());
  for (size_t i = 0; i < got->stages.size(); ++i) {
    EXPECT_EQ(got->stages[i].stage, expected->stages[i].stage);
    EXPECT_EQ(got->stages[i].max_abs_error, expected->stages[i].max_abs_error);
    EXPECT_EQ(got->stages[i].max_rel_error, expected->stages[i].max_rel_error);
    EXPECT_EQ(got->stages[i].max_ulp_error, expected->stages[i].max_ulp_error);
    EXPECT_EQ(got->stages[i].max_error_over_bound, expected->stages[i].max_error_over_bound);
  }
}

TEST(StreamedCallTest, ANormHasTheAnswerOfOneMessage) {
  const RealServer server;
  RemoteEngine whole({.target = server.target(), .stream_from_bytes = kNever});
  for (const int axes : {1, 2, 3}) {
    NormalizeCall call;
    call.spec = {.kind = NormKind::kLayerNorm, .rounding = NormRounding::kBeforeGamma, .group_size = 6};
    call.spec.normalized_axes = axes;
    call.inputs.input = SeededInput(1, DType::kFloat16, {50, 4, 6});
    call.inputs.residual = SeededTensor(1, "residual", DType::kFloat16, {50, 4, 6}, 1.0);
    call.output_dtype = DType::kFloat32;
    call.verify = call.intermediates = true;
    const auto expected = Normalize(whole, call);
    ASSERT_TRUE(expected.ok()) << expected.status();
    for (const int64_t chunk_bytes : {1, 1000, 1 << 20}) {
      RemoteEngine streams(Streams(server.target(), chunk_bytes));
      const auto got = Normalize(streams, call);
      ASSERT_TRUE(got.ok()) << got.status();
      ExpectSame(got->outputs.output, expected->outputs.output);
      ExpectSame(got->outputs.residual_sum, expected->outputs.residual_sum);
      ExpectSame(got->outputs.inverse_rms, expected->outputs.inverse_rms);
      ExpectSame(got->outputs.mean, expected->outputs.mean);
      ExpectSame(got->report, expected->report);
    }
  }
}

FeedForwardCall SwiGlu(Shape input) {
  FeedForwardCall call;
  call.spec = SwiGluSpec();
  call.weights = SeededFeedForwardWeights(1, call.spec, DType::kFloat32, input.back(), 48, /*biases=*/true);
  call.input = SeededInput(1, DType::kBFloat16, std::move(input));
  return call;
}

TEST(StreamedCallTest, AFeedForwardLayerHasTheAnswerOfOneMessage) {
  const RealServer server;
  RemoteEngine whole({.target = server.target(), .stream_from_bytes = kNever});
  for (const Shape& shape : {Shape{70, 20}, Shape{5, 14, 20}, Shape{1, 1, 70, 20}, Shape{20}}) {
    FeedForwardCall call = SwiGlu(shape);
    call.verify = call.intermediates = true;
    const auto expected = FeedForward(whole, call);
    ASSERT_TRUE(expected.ok()) << expected.status();
    for (const int64_t chunk_bytes : {1, 3000, 1 << 20}) {
      RemoteEngine streams(Streams(server.target(), chunk_bytes));
      const auto got = FeedForward(streams, call);
      ASSERT_TRUE(got.ok()) << got.status();
      ExpectSame(got->outputs.output, expected->outputs.output);
      ExpectSame(got->outputs.gate, expected->outputs.gate);
      ExpectSame(got->outputs.up, expected->outputs.up);
      ExpectSame(got->outputs.hidden, expected->outputs.hidden);
      ExpectSame(got->report, expected->report);
    }
  }
}

TEST(StreamedCallTest, WhatIsTooLargeForTheServersMessagesGoesAsAStream) {
  const RealServer server(1 << 20);
  RemoteEngine engine({.target = server.target()});
  const Arena arena(1);
  // The request; gRPC's own limit, of twice that; and the answer alone.
  for (const int64_t rows : {400, 2000}) {
    NormalizeCall call;
    call.inputs.input = SeededInput(1, DType::kFloat32, {rows, 1024});
    const auto got = Normalize(engine, call);
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectSame(got->outputs.output, Normalize(arena, {}, call.inputs, std::nullopt, false)->output);
  }
  FeedForwardCall call;  // whose answer is counted as twice what it is
  call.spec = ReluSpec();
  call.weights = SeededFeedForwardWeights(1, call.spec, DType::kFloat32, 20, 48, /*biases=*/true);
  call.input = SeededInput(1, DType::kFloat32, {2000, 20});
  call.intermediates = true;
  const auto got = FeedForward(engine, call);
  ASSERT_TRUE(got.ok()) << got.status();
  ExpectSame(got->outputs.hidden, FeedForward(arena, call.spec, call.weights, call.input, std::nullopt, true)->hidden);
}

TEST(StreamedCallTest, WhatCannotBeDividedIsRefusedAsBefore) {
  const RealServer server(1 << 20);
  RemoteEngine engine(Streams(server.target(), 1 << 20));
  NormalizeCall wide;  // rows beyond what a message of a stream may have
  wide.inputs.input = SeededInput(1, DType::kFloat32, {2, (1 << 20) + 1});
  EXPECT_EQ(DivisibleBytes(wide), 0);
  EXPECT_EQ(Normalize(engine, wide).status().code(), absl::StatusCode::kResourceExhausted);
  FeedForwardCall heavy = SwiGlu({4, 20});  // weights beyond what the first message may have
  heavy.weights = SeededFeedForwardWeights(1, heavy.spec, DType::kFloat32, 20, 6000, /*biases=*/false);
  EXPECT_EQ(DetailsOf(FeedForward(engine, heavy).status()).reason, "MESSAGE_TOO_LARGE");
  NormalizeCall odd;
  odd.inputs.input = SeededInput(1, DType::kFloat32, {3, 8});
  odd.inputs.residual = SeededInput(1, DType::kFloat32, {4, 8});
  EXPECT_EQ(DivisibleBytes(odd), 0);
  EXPECT_EQ(DetailsOf(Normalize(engine, odd).status()).field, "residual.shape");
  odd.inputs.residual.reset();
  odd.spec.normalized_axes = 3;
  EXPECT_EQ(DivisibleBytes(odd), 0);
  EXPECT_EQ(DetailsOf(Normalize(engine, odd).status()).field, "spec.normalized_axes");
}

NormalizeCall SomeRows() {
  NormalizeCall call;
  call.inputs.input = SeededInput(1, DType::kFloat32, {10, 8});
  call.context.deadline = absl::Now() + absl::Seconds(60);  // no test hangs
  return call;
}

// The error that a server with this behaviour brings about.
absl::Status ErrorBy(const FakeServer::Behaviour& behaviour, NormalizeCall call = SomeRows()) {
  FakeServer server(behaviour);
  RemoteEngine engine(Streams(server.target(), 64));
  return Normalize(engine, std::move(call)).status();
}

TEST(StreamedCallTest, AnswersThatDoNotFitEachOtherAreMalformed) {
  const auto no_rows = [](int i, v1::Tensor* tensor) {
    tensor->set_dtype(v1::DTYPE_FLOAT32);
    tensor->add_shape(i == 0 ? 0 : 2);
  };
  const std::map<std::string, std::function<void(int, v1::NormalizeResponse&)>> faults = {
      {"too few rows",
       [](int i, v1::NormalizeResponse& answer) {
         if (i != 3) return;
         answer.mutable_output()->set_shape(0, 1);
         answer.mutable_output()->mutable_data()->resize(32);
       }},
      {"another layer", [](int i, v1::NormalizeResponse& answer) { answer.set_layer_hash(i < 3 ? "one" : "another"); }},
      {"a report too many",
       [](int i, v1::NormalizeResponse& answer) {
         if (i == 2) answer.mutable_report();
       }},
      {"a report that ends",
       [](int i, v1::NormalizeResponse& answer) {
         if (i < 2) answer.mutable_report();
       }},
      {"a tensor too many",
       [](int i, v1::NormalizeResponse& answer) {
         if (i == 2) *answer.mutable_residual_sum() = answer.output();
       }},
      {"a tensor that ends",
       [](int i, v1::NormalizeResponse& answer) {
         if (i < 2) *answer.mutable_residual_sum() = answer.output();
       }},
      {"another part of a row",
       [&](int i, v1::NormalizeResponse& answer) {
         auto* mean = answer.mutable_intermediates()->mutable_mean();
         no_rows(i, mean);
         mean->add_shape(i < 2 ? 1 : 2);
         mean->set_data(std::string(i == 0 ? 0 : i < 2 ? 8 : 16, '\0'));
       }},
      {"rows where none were sent",
       [&](int, v1::NormalizeResponse& answer) {
         no_rows(1, answer.mutable_intermediates()->mutable_mean());
         answer.mutable_intermediates()->mutable_mean()->set_data(std::string(8, '\0'));
       }},
      {"a shape beyond all bounds", [&](int i, v1::NormalizeResponse& answer) {
         auto* mean = answer.mutable_intermediates()->mutable_mean();
         no_rows(0, mean);
         for (int axis = 0; axis < 2; ++axis) mean->add_shape(1 << 19);
       }}};
  EXPECT_TRUE(ErrorBy(Answering([](int, v1::NormalizeResponse&) {})).ok());
  for (const auto& [name, fault] : faults) {
    const absl::Status status = ErrorBy(Answering(fault));
    EXPECT_EQ(DetailsOf(status).reason, kMalformedAnswer) << name << ": " << status;
  }
}

TEST(StreamedCallTest, AnswersOutOfTheirTurnAreMalformed) {
  using Rpc = FakeServer::NormalizeRpc;
  const auto serve = [](int answers, int more) {
    return [answers, more](grpc::ServerContext&, Rpc& rpc) {
      v1::StreamNormalizeRequest request;
      for (int i = 0; i < answers && rpc.Read(&request); ++i) {
        for (int copy = 0; copy <= more; ++copy) rpc.Write(Echo(request));
      }
      return grpc::Status::OK;
    };
  };
  for (const auto& [answers, more] : {std::pair(0, 0), {1, 0}, {3, 0}, {5, 0}, {1000, 1}}) {
    const absl::Status status = ErrorBy(serve(answers, more));
    EXPECT_EQ(DetailsOf(status).reason, kMalformedAnswer) << answers << ": " << status;
  }
  // One more when all is said.
  const absl::Status status = ErrorBy([](grpc::ServerContext&, Rpc& rpc) {
    v1::StreamNormalizeRequest request;
    while (rpc.Read(&request)) rpc.Write(Echo(request));
    rpc.Write(Echo(request));
    return grpc::Status::OK;
  });
  EXPECT_EQ(DetailsOf(status).reason, kMalformedAnswer) << status;
}

TEST(StreamedCallTest, AServerThatNeverAnswersIsWaitedForUntilTheDeadline) {
  NormalizeCall call = SomeRows();
  call.context.deadline = absl::Now() + absl::Milliseconds(200);
  const absl::Status status = ErrorBy(WaitForTheEnd, call);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(DetailsOf(status).reason, "");  // no server has said so
}

TEST(StreamedCallTest, ACallThatIsNotWantedAnyMoreIsLeft) {
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  NormalizeCall call = SomeRows();
  call.context.cancelled = cancelled;
  EXPECT_EQ(ErrorBy(Answering([&](int i, v1::NormalizeResponse&) {
                      if (i == 1) *cancelled = true;
                    }),
                    call)
                .code(),
            absl::StatusCode::kCancelled);
}

TEST(StreamedCallTest, ErrorsInTheMiddleAreTheServers) {
  for (const int after : {0, 1, 4}) {
    const absl::Status status = ErrorBy([after](grpc::ServerContext&, FakeServer::NormalizeRpc& rpc) {
      v1::StreamNormalizeRequest request;
      for (int i = 0; i < after && rpc.Read(&request); ++i) rpc.Write(Echo(request));
      return wire::EncodeStatus(QueueFull(7, 0.5, "--queue_calls"));
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(DetailsOf(status).reason, "OVERLOADED");
    EXPECT_TRUE(DetailsOf(status).retry_delay_ms.has_value());
  }
}

TEST(StreamedCallTest, ALayerThatIsReplacedMeanwhileIsAskedAgainAFewTimes) {
  for (const int changes : {1, 2, 3, 100}) {
    std::atomic<int> left = changes;
    FakeServer server([&](grpc::ServerContext&, FakeServer::NormalizeRpc& rpc) {
      v1::StreamNormalizeRequest request;
      const bool changed = left-- > 0;
      for (int i = 0; rpc.Read(&request); ++i) {
        if (changed && i == 2) {
          return wire::EncodeStatus(WithDetails(absl::StatusCode::kAborted, "replaced", {.reason = "LAYER_CHANGED"}));
        }
        v1::NormalizeResponse response = Echo(request);
        response.set_layer_hash(std::to_string(left));
        rpc.Write(response);
      }
      return grpc::Status::OK;
    });
    RemoteEngine engine(Streams(server.target(), 64));
    const auto got = Normalize(engine, SomeRows());
    EXPECT_EQ(got.ok(), changes < 3) << got.status();
    EXPECT_EQ(server.streams(), std::min(changes + 1, 3));
    if (got.ok()) {
      ExpectSame(got->outputs.output, SomeRows().inputs.input);
    } else {
      EXPECT_EQ(DetailsOf(got.status()).reason, "LAYER_CHANGED");
    }
  }
}

}  // namespace
}  // namespace layerd
