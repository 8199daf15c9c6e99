// Streams as objects of the client library, against a real server and against ones that answer what no layerd does.
#include "client/row_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/remote_engine.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "tests/client/stream_servers.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

constexpr int64_t kDim = 24;

// Rows for a chunk of a norm that has everything.
NormalizeChunk SomeRows(uint64_t seed, int64_t rows) {
  return {.input = SeededInput(seed, DType::kBFloat16, {rows, kDim}),
          .residual = SeededTensor(seed, "residual", DType::kBFloat16, {rows, kDim}, 1.0),
          .gate = SeededTensor(seed, "gate", DType::kBFloat16, {rows, kDim}, 1.0)};
}

NormalizeCall FullNorm(const NormalizeChunk& rows) {
  NormalizeCall call;
  call.spec.rounding = NormRounding::kAfterGamma;
  call.spec.gate_position = GatePosition::kLast;
  call.inputs = {.input = rows.input,
                 .gamma = SeededGamma(1, DType::kFloat32, kDim),
                 .residual = rows.residual,
                 .gate = rows.gate};
  call.output_dtype = DType::kFloat32;
  call.intermediates = true;
  return call;
}

NormalizeCall PlainNorm(int64_t rows, int64_t dim = kDim) {
  NormalizeCall call;
  call.inputs.input = SeededInput(1, DType::kFloat32, {rows, dim});
  call.context.deadline = absl::Now() + absl::Seconds(60);  // no test hangs
  return call;
}

void ExpectAnswer(const absl::StatusOr<std::optional<NormalizeResult>>& answer, const NormalizeCall& call) {
  ASSERT_TRUE(answer.ok()) << answer.status();
  ASSERT_TRUE(answer->has_value());
  const Arena arena(1);
  const auto expected = Normalize(arena, call.spec, call.inputs, call.output_dtype, call.intermediates);
  const NormalizeOutputs& got = (*answer)->outputs;
  EXPECT_TRUE(SameBits(got.output, expected->output));
  ASSERT_TRUE(got.residual_sum && got.inverse_rms);
  EXPECT_TRUE(SameBits(*got.residual_sum, *expected->residual_sum));
  EXPECT_TRUE(SameBits(*got.inverse_rms, *expected->inverse_rms));
}

TEST(RowStreamTest, AnswersEachMessageAsACall) {
  const RealServer server;
  RemoteEngine engine({.target = server.target()});
  const std::vector<int64_t> sizes = {0, 1, 300, 7, 0, 1000};
  const auto stream = engine.StreamNormalize(FullNorm(SomeRows(0, 5)));
  std::thread writer([&] {
    for (size_t i = 0; i < sizes.size(); ++i) EXPECT_TRUE(stream->Write(SomeRows(i + 1, sizes[i])));
    stream->WritesDone();
    EXPECT_FALSE(stream->Write(SomeRows(1, 1)));
  });
  ExpectAnswer(stream->Read(), FullNorm(SomeRows(0, 5)));
  for (size_t i = 0; i < sizes.size(); ++i) ExpectAnswer(stream->Read(), FullNorm(SomeRows(i + 1, sizes[i])));
  for (int i = 0; i < 2; ++i) {
    const auto end = stream->Read();
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_FALSE(end->has_value());
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(RowStreamTest, OneThreadNeverWaitsForItself) {
  const RealServer server;
  RemoteEngine engine({.target = server.target()});
  constexpr int64_t kWide = 4096, kRows = kMostRowBytes / (kWide * 4);
  const Tensor input = SeededInput(1, DType::kFloat32, {kRows, kWide});
  const Arena arena(1);
  const auto expected = Normalize(arena, {}, {.input = input}, std::nullopt, false);
  const auto stream = engine.StreamNormalize(PlainNorm(0, kWide));
  int sent = 1;
  for (int got = 0; got < 12; ++got) {
    for (; sent < 12 && sent - got < kMostUnanswered; ++sent) ASSERT_TRUE(stream->Write({.input = input}));
    const auto answer = stream->Read();
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_TRUE(got == 0 || SameBits((*answer)->outputs.output, expected->output)) << got;
  }
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(RowStreamTest, FeedForwardHasItsOwnWidth) {
  const RealServer server;
  RemoteEngine engine({.target = server.target()});
  FeedForwardCall call;
  call.spec = ReluSpec();
  call.spec.layout = WeightLayout::kOutIn;
  call.weights.up = SeededTensor(1, "up", DType::kFloat32, {9, kDim}, 1.0);
  call.weights.down = SeededTensor(1, "down", DType::kFloat32, {5, 9}, 1.0);
  call.input = SeededInput(1, DType::kFloat32, {0, kDim});
  const auto stream = engine.StreamFeedForward(call);
  call.input = SeededInput(1, DType::kFloat32, {40, kDim});
  ASSERT_TRUE(stream->Write({.input = call.input}));
  ASSERT_TRUE(stream->Read().ok());
  const auto answer = stream->Read();
  ASSERT_TRUE(answer.ok()) << answer.status();
  const Arena arena(1);
  EXPECT_TRUE(SameBits((*answer)->outputs.output,
                       FeedForward(arena, call.spec, call.weights, call.input, std::nullopt, false)->output));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(RowStreamTest, AnErrorComesAfterTheAnswersBeforeItAndStays) {
  const RealServer server;
  RemoteEngine engine({.target = server.target()});
  const auto stream = engine.StreamNormalize(FullNorm(SomeRows(1, 2)));
  ASSERT_TRUE(stream->Write(SomeRows(2, 3)));
  NormalizeChunk wide = SomeRows(3, 3);
  wide.residual = SeededInput(1, DType::kBFloat16, {3, kDim + 1});
  ASSERT_TRUE(stream->Write(wide));
  ExpectAnswer(stream->Read(), FullNorm(SomeRows(1, 2)));
  ExpectAnswer(stream->Read(), FullNorm(SomeRows(2, 3)));
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = stream->Read().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(DetailsOf(status).reason, "SHAPE_MISMATCH");
    EXPECT_EQ(DetailsOf(status).field, "residual.shape");
  }
  EXPECT_FALSE(stream->Write(SomeRows(1, 1)));
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RowStreamTest, TheFirstMessagesFieldsAreTheCalls) {
  FakeServer server([](grpc::ServerContext&, FakeServer::NormalizeRpc&) {
    return wire::EncodeStatus(InvalidField("call.spec.kind", "MISSING", "expected one"));
  });
  RemoteEngine engine({.target = server.target()});
  const absl::Status status = engine.StreamNormalize(PlainNorm(1))->Read().status();
  EXPECT_EQ(status.message(), "spec.kind: expected one");
  EXPECT_EQ(DetailsOf(status).field, "spec.kind");
}

TEST(RowStreamTest, MayBeLeftAtAnyPoint) {
  const RealServer server;
  for (int point = 0; point < 6; ++point) {
    std::unique_ptr<NormalizeStream> stream;
    {
      RemoteEngine engine({.target = server.target()});  // which it outlives
      stream = engine.StreamNormalize(PlainNorm(point % 2));
    }
    if (point > 0) {
      EXPECT_TRUE(stream->Write({.input = SeededInput(1, DType::kFloat32, {20000, kDim})}));
    }
    if (point > 2) {
      EXPECT_TRUE(stream->Read().ok());
    }
    if (point > 3) stream->WritesDone();
    if (point > 4) {
      EXPECT_TRUE(stream->Read().ok());
    }
  }
}

TEST(RowStreamTest, AServerThatDoesNotReadMakesTheWriterWait) {
  // 256 MiB, of which little can be on its way.
  const Tensor rows = SeededInput(1, DType::kFloat32, {1 << 10, 1 << 8});
  FakeServer server([](grpc::ServerContext& context, FakeServer::NormalizeRpc&) {
    while (!context.IsCancelled()) std::this_thread::yield();
    return grpc::Status::CANCELLED;
  });
  RemoteEngine engine({.target = server.target()});
  NormalizeCall call = PlainNorm(0, 1 << 8);
  call.context.deadline = absl::Now() + absl::Seconds(1);
  const auto stream = engine.StreamNormalize(call);
  int written = 0;
  while (written < 256 && stream->Write({.input = rows})) ++written;
  EXPECT_LT(written, 64);
  EXPECT_EQ(stream->Read().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(RowStreamTest, CancelEndsEveryWait) {
  FakeServer server(WaitForTheEnd);
  RemoteEngine engine({.target = server.target()});
  const auto stream = engine.StreamNormalize(PlainNorm(1));
  std::thread reader([&] { EXPECT_EQ(stream->Read().status().code(), absl::StatusCode::kCancelled); });
  std::thread writer([&] {
    while (stream->Write({.input = SeededInput(1, DType::kFloat32, {100, kDim})})) continue;
  });
  while (server.streams() == 0) std::this_thread::yield();
  stream->Cancel();
  reader.join();
  writer.join();
}

TEST(RowStreamTest, CancelledWhileBothThreadsAreAtWorkItEndsForBoth) {
  const RealServer server;
  RemoteEngine engine({.target = server.target()});
  const Tensor rows = SeededInput(1, DType::kFloat32, {1000, kDim});
  for (int answers = 0; answers < 200; ++answers) {
    const auto stream = engine.StreamNormalize(PlainNorm(1));
    std::thread writer([&] {
      while (stream->Write({.input = rows})) continue;
    });
    for (int i = 0; i < answers % 7; ++i) EXPECT_TRUE(stream->Read().ok());
    std::thread canceller([&] { stream->Cancel(); });
    absl::StatusOr<std::optional<NormalizeResult>> answer;
    do {
      answer = stream->Read();
    } while (answer.ok());
    EXPECT_EQ(answer.status().code(), absl::StatusCode::kCancelled);
    writer.join();
    canceller.join();
  }
}

TEST(RowStreamTest, AnswersThatDoNotFitAreMalformed) {
  const std::map<std::string, std::function<void(int, v1::NormalizeResponse&)>> faults = {
      {"too few rows",
       [](int, v1::NormalizeResponse& answer) {
         answer.mutable_output()->set_shape(0, 1);
         answer.mutable_output()->mutable_data()->resize(kDim * 4);
       }},
      {"too many rows",
       [](int, v1::NormalizeResponse& answer) {
         answer.mutable_output()->set_shape(0, 3);
         answer.mutable_output()->mutable_data()->resize(3 * kDim * 4);
       }},
      {"another width",
       [](int, v1::NormalizeResponse& answer) {
         answer.mutable_output()->set_shape(0, kDim);
         answer.mutable_output()->set_shape(1, 2);
       }},
      {"another rank", [](int, v1::NormalizeResponse& answer) { answer.mutable_output()->add_shape(1); }},
      {"another dtype",
       [](int, v1::NormalizeResponse& answer) {
         answer.mutable_output()->set_dtype(v1::DTYPE_BFLOAT16);
         answer.mutable_output()->mutable_data()->resize(2 * kDim * 2);
       }},
      {"other bytes than it says", [](int, v1::NormalizeResponse& answer) { answer.mutable_output()->clear_data(); }},
      {"nothing", [](int, v1::NormalizeResponse& answer) { answer.Clear(); }}};
  for (const auto& [name, fault] : faults) {
    FakeServer server(Answering(fault));
    RemoteEngine engine({.target = server.target()});
    const auto stream = engine.StreamNormalize(PlainNorm(2));
    const absl::Status status = stream->Read().status();
    EXPECT_EQ(DetailsOf(status).reason, kMalformedAnswer) << name << ": " << status;
    EXPECT_EQ(stream->Finish(), status) << name;
  }
}

TEST(RowStreamTest, AnswersOutOfTheirTurnAreMalformed) {
  using Rpc = FakeServer::NormalizeRpc;
  const std::map<std::string, FakeServer::Behaviour> behaviours = {
      {"an answer nobody asked for",
       [](grpc::ServerContext&, Rpc& rpc) {
         v1::StreamNormalizeRequest request;
         rpc.Read(&request);
         for (int i = 0; i < 2; ++i) rpc.Write(Echo(request));
         while (rpc.Read(&request)) continue;
         return grpc::Status::OK;
       }},
      {"an end before the answer", [](grpc::ServerContext&, Rpc&) { return grpc::Status::OK; }},
      {"an end before all was sent", [](grpc::ServerContext&, Rpc& rpc) {
         v1::StreamNormalizeRequest request;
         rpc.Read(&request);
         rpc.Write(Echo(request));
         return grpc::Status::OK;
       }}};
  for (const auto& [name, behaviour] : behaviours) {
    FakeServer server(behaviour);
    RemoteEngine engine({.target = server.target()});
    const auto stream = engine.StreamNormalize(PlainNorm(2));
    absl::StatusOr<std::optional<NormalizeResult>> answer = stream->Read();
    if (answer.ok()) answer = stream->Read();
    EXPECT_EQ(DetailsOf(answer.status()).reason, kMalformedAnswer) << name << ": " << answer.status();
  }
}

TEST(RowStreamTest, NobodyThereIsUnavailableWithoutAReason) {
  RemoteEngine engine({.target = "127.0.0.1:1"});
  const absl::Status status = engine.StreamNormalize(PlainNorm(1))->Read().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(DetailsOf(status).reason, "");
}

}  // namespace
}  // namespace layerd
