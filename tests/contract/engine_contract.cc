#include "tests/contract/engine_contract.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {
namespace {

void ExpectSame(const std::optional<Tensor>& got, const std::optional<Tensor>& expected, const char* what) {
  ASSERT_EQ(got.has_value(), expected.has_value()) << what;
  if (got) {
    EXPECT_TRUE(SameBits(*got, *expected)) << what;
  }
}

void ExpectSame(const NormalizeOutputs& got, const NormalizeOutputs& expected) {
  ExpectSame(got.output, expected.output, "output");
  ExpectSame(got.residual_sum, expected.residual_sum, "residual_sum");
  ExpectSame(got.inverse_rms, expected.inverse_rms, "inverse_rms");
  ExpectSame(got.mean, expected.mean, "mean");
}

void ExpectSame(const FeedForwardOutputs& got, const FeedForwardOutputs& expected) {
  ExpectSame(got.output, expected.output, "output");
  ExpectSame(got.gate, expected.gate, "gate");
  ExpectSame(got.up, expected.up, "up");
  ExpectSame(got.hidden, expected.hidden, "hidden");
  ExpectSame(got.normed, expected.normed, "normed");
}

NormalizeCall FullNorm(DType dtype, NormKind kind, GatePosition gate) {
  NormalizeCall call;
  call.spec.kind = kind;
  call.spec.epsilon = 3e-5;
  call.spec.rounding = NormRounding::kBeforeGamma;
  call.spec.gamma_offset = 1;
  call.spec.group_size = 12;
  call.spec.gate_position = gate;
  call.spec.normalized_axes = 2;
  call.inputs.input = SeededInput(1, dtype, {3, 4, 6});
  call.inputs.gamma = SeededGamma(1, DType::kBFloat16, 24).Reshaped({4, 6});
  call.inputs.beta = SeededBeta(1, DType::kFloat32, 24);
  call.inputs.residual = SeededTensor(1, "residual", dtype, {3, 4, 6}, 1.0);
  if (gate != GatePosition::kNone) call.inputs.gate = SeededTensor(1, "gate", dtype, {3, 4, 6}, 1.0);
  return call;
}

FeedForwardCall FullLayer(DType dtype, FeedForwardForm form, GateUpPacking packing, WeightLayout layout) {
  FeedForwardCall call;
  call.spec.form = form;
  call.spec.packing = packing;
  call.spec.layout = layout;
  call.spec.activation = {Activation::kSilu, 1.25};
  call.spec.inner_norm = InnerNorm{1e-5};
  if (form == FeedForwardForm::kGated) {
    call.spec.gate_max = 7;
    call.spec.up_limit = 6;
    call.spec.up_offset = 1;
  }
  call.input = SeededInput(1, dtype, {2, 3, 20});
  call.weights = SeededFeedForwardWeights(1, call.spec, dtype, 20, 36, true);
  return call;
}

TEST_P(EngineContractTest, NormalizeGivesTheBitsOfTheLayer) {
  const Arena arena(1);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      for (const GatePosition gate : {GatePosition::kNone, GatePosition::kFirst, GatePosition::kLast}) {
        for (const std::optional<DType> output_dtype : {std::optional<DType>(), std::optional(DType::kFloat16)}) {
          NormalizeCall call = FullNorm(dtype, kind, gate);
          call.output_dtype = output_dtype;
          call.intermediates = kind == NormKind::kLayerNorm;
          const auto expected = Normalize(arena, call.spec, call.inputs, output_dtype, call.intermediates);
          const auto got = Normalize(engine(), call);
          ASSERT_TRUE(got.ok()) << got.status();
          ExpectSame(got->outputs, *expected);
          EXPECT_FALSE(got->report.has_value());
        }
      }
    }
  }
}

TEST_P(EngineContractTest, FeedForwardGivesTheBitsOfTheLayer) {
  const Arena arena(1);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const FeedForwardForm form : {FeedForwardForm::kGated, FeedForwardForm::kPlain}) {
      for (const GateUpPacking packing :
           {GateUpPacking::kSeparate, GateUpPacking::kHalves, GateUpPacking::kInterleaved}) {
        if (form == FeedForwardForm::kPlain && packing != GateUpPacking::kSeparate) continue;
        for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
          FeedForwardCall call = FullLayer(dtype, form, packing, layout);
          call.intermediates = layout == WeightLayout::kOutIn;
          const auto expected =
              FeedForward(arena, call.spec, call.weights, call.input, std::nullopt, call.intermediates);
          const auto got = FeedForward(engine(), call);
          ASSERT_TRUE(got.ok()) << got.status();
          ExpectSame(got->outputs, *expected);
        }
      }
    }
  }
}

TEST_P(EngineContractTest, Int8MatricesGiveTheBitsOfTheLayerAndAreJudgedByTheirValues) {
  const Arena arena(1);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const GateUpPacking packing :
         {GateUpPacking::kSeparate, GateUpPacking::kHalves, GateUpPacking::kInterleaved}) {
      FeedForwardCall call = FullLayer(dtype, FeedForwardForm::kGated, packing, WeightLayout::kOutIn);
      call.weights = SeededInt8Weights(1, call.spec, 20, 36, /*biases=*/true);
      call.intermediates = call.verify = true;
      const auto expected = FeedForward(arena, call.spec, call.weights, call.input, std::nullopt, true);
      ASSERT_TRUE(expected.ok()) << expected.status();
      const auto got = FeedForward(engine(), call);
      ASSERT_TRUE(got.ok()) << got.status();
      ExpectSame(got->outputs, *expected);
      ASSERT_TRUE(got->report.has_value());
      EXPECT_TRUE(got->report->within_contract);
    }
  }
}

TEST_P(EngineContractTest, Int8IsRefusedWhereNoMatrixIs) {
  const auto refused = [&](const absl::Status& status, const char* field, const char* text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailsOf(status).field, field) << status;
    EXPECT_EQ(status.message(), std::string(field) + ": " + text);
  };
  constexpr char kFloats[] = "expected float32, float16 or bfloat16, got int8";
  NormalizeCall norm;
  norm.inputs.input = Tensor::FromFloats(DType::kInt8, {1, 4}, {1, 2, 3, 4});
  refused(Normalize(engine(), norm).status(), "input.dtype", kFloats);
  norm.inputs.input = SeededInput(1, DType::kFloat32, {1, 4});
  norm.output_dtype = DType::kInt8;
  refused(Normalize(engine(), norm).status(), "output_dtype", kFloats);
  norm.output_dtype.reset();
  norm.inputs.gamma = Tensor::FromFloats(DType::kInt8, {4}, {1, 2, 3, 4});
  refused(Normalize(engine(), norm).status(), "gamma.dtype", kFloats);

  const auto layer = [] {
    FeedForwardCall call =
        FullLayer(DType::kFloat32, FeedForwardForm::kGated, GateUpPacking::kSeparate, WeightLayout::kOutIn);
    call.weights = SeededInt8Weights(1, call.spec, 20, 36, /*biases=*/true);
    return call;
  };
  FeedForwardCall call = layer();
  call.output_dtype = DType::kInt8;
  refused(FeedForward(engine(), call).status(), "output_dtype", kFloats);
  call = layer();
  call.input = Tensor::Allocate(DType::kInt8, {1, 20});
  refused(FeedForward(engine(), call).status(), "input.dtype", kFloats);
  call = layer();
  call.weights.down_bias = Tensor::Allocate(DType::kInt8, {20});
  refused(FeedForward(engine(), call).status(), "weights.down_bias.dtype", kFloats);
  call = layer();
  call.weights.up_scale.reset();
  refused(FeedForward(engine(), call).status(), "weights.up_scale",
          "expected scales, float16 [36, 1], since weights.up is int8, got nothing");
  call = layer();
  call.weights.down_scale = Tensor::Allocate(DType::kFloat16, {20, 1});
  refused(FeedForward(engine(), call).status(), "weights.down_scale.shape",
          "expected [20, 2], one for each 32 inputs of weights.down [20, 36], got [20, 1]");
}

// Memory for an output, with bytes around it that must stay as they are.
class OutputMemory {
 public:
  explicit OutputMemory(int64_t bytes) : bytes_(bytes), all_(Tensor::Allocate(DType::kInt8, {bytes + 2 * kAround})) {
    std::fill_n(all_.mutable_data(), all_.num_bytes(), kMark);
  }
  MemoryPlace place() {
    return {std::shared_ptr<std::byte>(std::shared_ptr<void>(), all_.mutable_data() + kAround), bytes_};
  }
  void ExpectHas(const Tensor& output) const {
    EXPECT_EQ(output.data(), all_.data() + kAround);
    for (int64_t i = 0; i < kAround; ++i) {
      ASSERT_EQ(all_.data()[i], kMark);
      ASSERT_EQ(all_.data()[kAround + static_cast<int64_t>(output.num_bytes()) + i], kMark);
    }
  }

 private:
  static constexpr int64_t kAround = 64;
  static constexpr std::byte kMark{0xA5};
  const int64_t bytes_;
  Tensor all_;
};

TEST_P(EngineContractTest, AnOutputGoesWhereTheCallSays) {
  const Arena arena(1);
  for (const DType output_dtype : {DType::kFloat32, DType::kBFloat16}) {
    NormalizeCall norm = FullNorm(DType::kFloat32, NormKind::kLayerNorm, GatePosition::kLast);
    norm.output_dtype = output_dtype;
    norm.verify = norm.intermediates = true;
    OutputMemory memory(72 * static_cast<int64_t>(SizeOf(output_dtype)));
    norm.output_memory = memory.place();
    const auto normed = Normalize(engine(), norm);
    ASSERT_TRUE(normed.ok()) << normed.status();
    ExpectSame(normed->outputs, *Normalize(arena, norm.spec, norm.inputs, output_dtype, true));
    memory.ExpectHas(normed->outputs.output);
    EXPECT_TRUE(normed->report->within_contract);

    FeedForwardCall layer =
        FullLayer(DType::kFloat32, FeedForwardForm::kGated, GateUpPacking::kHalves, WeightLayout::kInOut);
    layer.output_dtype = output_dtype;
    layer.verify = layer.intermediates = true;
    OutputMemory layer_memory(1000);
    layer.output_memory = layer_memory.place();
    const auto fed = FeedForward(engine(), layer);
    ASSERT_TRUE(fed.ok()) << fed.status();
    ExpectSame(fed->outputs, *FeedForward(arena, layer.spec, layer.weights, layer.input, output_dtype, true));
    layer_memory.ExpectHas(fed->outputs.output);
    EXPECT_TRUE(fed->report->within_contract);
  }
}

TEST_P(EngineContractTest, OutputMemoryThatDoesNotFitIsRefused) {
  const auto refused = [](const absl::Status& status, const char* reason, const char* text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(DetailsOf(status).field, "output_memory");
    EXPECT_EQ(DetailsOf(status).reason, reason);
    EXPECT_EQ(std::string(status.message()), std::string("output_memory: ") + text);
  };
  NormalizeCall norm = FullNorm(DType::kFloat32, NormKind::kRmsNorm, GatePosition::kNone);
  OutputMemory memory(287);
  norm.output_memory = memory.place();
  refused(Normalize(engine(), norm).status(), "OUT_OF_RANGE",
          "expected room for an output of 288 bytes, got 287 bytes");
  FeedForwardCall layer =
      FullLayer(DType::kFloat32, FeedForwardForm::kGated, GateUpPacking::kSeparate, WeightLayout::kOutIn);
  OutputMemory small(479);
  layer.output_memory = small.place();
  refused(FeedForward(engine(), layer).status(), "OUT_OF_RANGE",
          "expected room for an output of 480 bytes, got 479 bytes");

  const auto inside = [](Tensor& tensor, int64_t skipped) {
    return MemoryPlace{std::shared_ptr<std::byte>(std::shared_ptr<void>(), tensor.mutable_data() + skipped), 1 << 20};
  };
  norm.output_memory = inside(norm.inputs.input, 0);
  refused(Normalize(engine(), norm).status(), "OVERLAP",
          "expected memory that no tensor of the call has, got some of input");
  // In a tensor of twice as many rows, so that nothing else of the call lies behind it.
  Shape twice = norm.inputs.input.shape();
  twice[0] *= 2;
  norm.inputs.residual = Tensor::FromFloats(DType::kFloat32, twice, std::vector<float>(144)).Rows(0, twice[0] / 2);
  norm.output_memory = inside(*norm.inputs.residual, 284);
  refused(Normalize(engine(), norm).status(), "OVERLAP",
          "expected memory that no tensor of the call has, got some of residual");
  layer.output_memory = inside(*layer.weights.down, 4);
  refused(FeedForward(engine(), layer).status(), "OVERLAP",
          "expected memory that no tensor of the call has, got some of weights.down");
  layer.output_memory = inside(layer.input, 2);
  refused(FeedForward(engine(), layer).status(), "MISALIGNED", "expected memory aligned to 4 bytes");
}

TEST_P(EngineContractTest, VerifiedAnswersCarryTheirReport) {
  NormalizeCall norm = FullNorm(DType::kFloat16, NormKind::kLayerNorm, GatePosition::kLast);
  norm.verify = true;
  const auto normed = Normalize(engine(), norm);
  ASSERT_TRUE(normed.ok()) << normed.status();
  ASSERT_TRUE(normed->report.has_value());
  EXPECT_TRUE(normed->report->within_contract);
  EXPECT_GT(normed->report->max_abs_error, 0);
  EXPECT_EQ(normed->report->stages.size(), 2u);

  FeedForwardCall layer =
      FullLayer(DType::kFloat32, FeedForwardForm::kGated, GateUpPacking::kHalves, WeightLayout::kInOut);
  layer.verify = true;
  const auto fed = FeedForward(engine(), layer);
  ASSERT_TRUE(fed.ok()) << fed.status();
  ASSERT_TRUE(fed->report.has_value());
  EXPECT_TRUE(fed->report->within_contract);
  EXPECT_EQ(fed->report->stages.size(), 5u);
  EXPECT_FALSE(fed->outputs.hidden.has_value());  // not asked for
}

TEST_P(EngineContractTest, ErrorsKeepTheirCodeReasonAndField) {
  NormalizeCall norm = FullNorm(DType::kFloat32, NormKind::kRmsNorm, GatePosition::kNone);
  norm.spec.epsilon = -1;
  const absl::Status status = Normalize(engine(), norm).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "spec.epsilon: expected a finite number of 0 or more, got -1");
  EXPECT_EQ(DetailsOf(status).reason, "EPSILON_OUT_OF_RANGE");
  EXPECT_EQ(DetailsOf(status).field, "spec.epsilon");

  FeedForwardCall layer =
      FullLayer(DType::kFloat32, FeedForwardForm::kGated, GateUpPacking::kSeparate, WeightLayout::kOutIn);
  layer.weights.down.reset();
  EXPECT_EQ(DetailsOf(FeedForward(engine(), layer).status()).field, "weights.down");
}

TEST_P(EngineContractTest, ExpiredAndCancelledCallsAreNotBegun) {
  NormalizeCall late = FullNorm(DType::kFloat32, NormKind::kRmsNorm, GatePosition::kNone);
  late.context.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_EQ(Normalize(engine(), late).status().code(), absl::StatusCode::kDeadlineExceeded);
  NormalizeCall unwanted = FullNorm(DType::kFloat32, NormKind::kRmsNorm, GatePosition::kNone);
  unwanted.context.cancelled = std::make_shared<std::atomic<bool>>(true);
  EXPECT_EQ(Normalize(engine(), unwanted).status().code(), absl::StatusCode::kCancelled);
}

TEST_P(EngineContractTest, NoRowsGiveNoRows) {
  FeedForwardCall layer =
      FullLayer(DType::kBFloat16, FeedForwardForm::kGated, GateUpPacking::kSeparate, WeightLayout::kOutIn);
  layer.input = Tensor::Allocate(DType::kBFloat16, {0, 20});
  const auto got = FeedForward(engine(), layer);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->outputs.output.shape(), (Shape{0, 20}));
}

TEST_P(EngineContractTest, NotANumberTravelsAndStaysInItsRow) {
  NormalizeCall call;
  call.inputs.input = SeededInput(1, DType::kFloat32, {3, 8});
  call.inputs.input.mutable_floats()[9] = std::numeric_limits<float>::quiet_NaN();
  const auto got = Normalize(engine(), call);
  ASSERT_TRUE(got.ok());
  for (int i = 0; i < 24; ++i) EXPECT_EQ(std::isnan(got->outputs.output.At(i)), i / 8 == 1) << i;
}

TEST_P(EngineContractTest, CallsAtOnceGetEachTheirOwnAnswer) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    callers.emplace_back([&, seed] {
      NormalizeCall call;
      call.inputs.input = SeededInput(seed, DType::kFloat32, {4, 100});
      const Arena arena(1);
      const auto expected = Normalize(arena, call.spec, call.inputs, std::nullopt, false);
      for (int i = 0; i < 25; ++i) {
        const auto got = Normalize(engine(), call);
        if (!got.ok() || !SameBits(got->outputs.output, expected->output)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace layerd
