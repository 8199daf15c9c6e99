#include "tests/contract/layers_by_name_contract.h"

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "lib/weights/layer_hash.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {
namespace {

constexpr int64_t kNormDim = 24, kDim = 20, kHiddenDim = 36;
const char kNorm[] = "models/contract/layers/norm", kRmsNorm[] = "models/contract/layers/rms_norm";
const char kGated[] = "models/contract/layers/gated", kPlain[] = "models/contract/layers/plain";
const char kInt8[] = "models/contract/layers/int8";
const char kDamaged[] = "models/contract/layers/damaged";

// Every option other than its default.
NormalizeLayer NormOfAllOptions() {
  NormalizeLayer layer;
  layer.spec.kind = NormKind::kLayerNorm;
  layer.spec.epsilon = 3e-5;
  layer.spec.rounding = NormRounding::kBeforeGamma;
  layer.spec.gamma_offset = 1;
  layer.spec.group_size = 12;
  layer.spec.gate_position = GatePosition::kLast;
  layer.weights.gamma = SeededGamma(1, DType::kBFloat16, kNormDim);
  layer.weights.beta = SeededBeta(1, DType::kFloat32, kNormDim);
  return layer;
}

NormalizeLayer PlainRmsNorm() {
  NormalizeLayer layer;
  layer.spec.rounding = NormRounding::kAfterGamma;
  layer.weights.gamma = SeededGamma(2, DType::kFloat32, kNormDim);
  return layer;
}

FeedForwardLayer GatedOfAllOptions() {
  FeedForwardLayer layer;
  layer.spec.packing = GateUpPacking::kInterleaved;
  layer.spec.activation = {Activation::kSilu, 1.25};
  layer.spec.gate_max = 7;
  layer.spec.up_limit = 6;
  layer.spec.up_offset = 1;
  layer.spec.inner_norm = InnerNorm{};
  layer.weights = SeededFeedForwardWeights(1, layer.spec, DType::kBFloat16, kDim, kHiddenDim, true);
  return layer;
}

FeedForwardLayer PlainLayer() {
  FeedForwardLayer layer;
  layer.spec.form = FeedForwardForm::kPlain;
  layer.spec.activation = {Activation::kGeluTanh};
  layer.spec.layout = WeightLayout::kInOut;
  layer.weights = SeededFeedForwardWeights(2, layer.spec, DType::kFloat32, kDim, kHiddenDim, true);
  return layer;
}

FeedForwardLayer Int8Layer() {
  FeedForwardLayer layer = GatedOfAllOptions();
  layer.weights = SeededInt8Weights(3, layer.spec, kDim, kHiddenDim, /*biases=*/true);
  layer.quantization = {.source_hash = std::string(64, 'a'), .matrices = {{"gate_up", 0.5, 1}, {"down", 0.25, 2}}};
  return layer;
}

NormalizeCall CallOf(const std::string& name, const NormalizeLayer& layer, DType dtype = DType::kFloat32) {
  NormalizeCall call;
  call.layer = name;
  call.inputs.input = SeededInput(1, dtype, {3, kNormDim});
  call.inputs.residual = SeededTensor(1, "residual", dtype, {3, kNormDim}, 1.0);
  if (layer.spec.gate_position != GatePosition::kNone) {
    call.inputs.gate = SeededTensor(1, "gate", dtype, {3, kNormDim}, 1.0);
  }
  return call;
}

FeedForwardCall CallOf(const std::string& name, DType dtype = DType::kFloat32) {
  FeedForwardCall call;
  call.layer = name;
  call.input = SeededInput(1, dtype, {2, 3, kDim});
  return call;
}

// The same call with the layer inside.
NormalizeCall Inline(NormalizeCall call, const NormalizeLayer& layer) {
  call.layer.clear();
  call.spec = layer.spec;
  call.inputs.gamma = layer.weights.gamma;
  call.inputs.beta = layer.weights.beta;
  return call;
}

FeedForwardCall Inline(FeedForwardCall call, const FeedForwardLayer& layer) {
  call.layer.clear();
  call.spec = layer.spec;
  call.weights = layer.weights;
  return call;
}

void ExpectSame(const std::optional<Tensor>& got, const std::optional<Tensor>& expected) {
  ASSERT_EQ(got.has_value(), expected.has_value());
  EXPECT_TRUE(!got || SameBits(*got, *expected));
}

void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& reason,
                 const std::string& field) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(DetailsOf(status).reason, reason) << status;
  EXPECT_EQ(DetailsOf(status).field, field) << status;
}

TEST_P(LayersByNameContractTest, NormsGiveTheBitsThatTheirWeightsGive) {
  for (const auto& [name, layer] : {std::pair(kNorm, NormOfAllOptions()), std::pair(kRmsNorm, PlainRmsNorm())}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      NormalizeCall call = CallOf(name, layer, dtype);
      call.output_dtype = DType::kFloat32;
      call.intermediates = call.verify = true;
      const auto got = Normalize(engine(), call), expected = Normalize(engine(), Inline(call, layer));
      ASSERT_TRUE(got.ok()) << got.status();
      ASSERT_TRUE(expected.ok()) << expected.status();
      ExpectSame(got->outputs.output, expected->outputs.output);
      ExpectSame(got->outputs.residual_sum, expected->outputs.residual_sum);
      ExpectSame(got->outputs.inverse_rms, expected->outputs.inverse_rms);
      ExpectSame(got->outputs.mean, expected->outputs.mean);
      ASSERT_TRUE(got->report.has_value());
      EXPECT_TRUE(got->report->within_contract);
      EXPECT_EQ(got->report->max_abs_error, expected->report->max_abs_error);
      EXPECT_EQ(got->layer_hash, ContentHash(Layer(layer)));
      EXPECT_EQ(expected->layer_hash, "");
    }
  }
}

TEST_P(LayersByNameContractTest, FeedForwardLayersGiveTheBitsThatTheirWeightsGive) {
  for (const auto& [name, layer] : {std::pair<const char*, FeedForwardLayer>(kGated, GatedOfAllOptions()),
                                    {kPlain, PlainLayer()},
                                    {kInt8, Int8Layer()}}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      FeedForwardCall call = CallOf(name, dtype);
      call.intermediates = call.verify = true;
      const auto got = FeedForward(engine(), call), expected = FeedForward(engine(), Inline(call, layer));
      ASSERT_TRUE(got.ok()) << got.status();
      ASSERT_TRUE(expected.ok()) << expected.status();
      ExpectSame(got->outputs.output, expected->outputs.output);
      ExpectSame(got->outputs.gate, expected->outputs.gate);
      ExpectSame(got->outputs.up, expected->outputs.up);
      ExpectSame(got->outputs.hidden, expected->outputs.hidden);
      ExpectSame(got->outputs.normed, expected->outputs.normed);
      ASSERT_TRUE(got->report.has_value());
      EXPECT_TRUE(got->report->within_contract);
      EXPECT_EQ(got->layer_hash, ContentHash(Layer(layer)));
      EXPECT_EQ(expected->layer_hash, "");
    }
  }
}

TEST_P(LayersByNameContractTest, OptionsThatTheLayerHasMayBeSaid) {
  NormalizeCall norm = CallOf(kNorm, NormOfAllOptions());
  norm.said = {.kind = NormKind::kLayerNorm,
               .epsilon = 3e-5,
               .rounding = NormRounding::kBeforeGamma,
               .gamma_offset = 1,
               .group_size = 12,
               .gate_position = GatePosition::kLast,
               .normalized_axes = 1};
  EXPECT_TRUE(Normalize(engine(), norm).ok());
  NormalizeCall rms = CallOf(kRmsNorm, PlainRmsNorm());
  // Defaults, said; and one group over all, said by its size.
  rms.said = {
      .kind = NormKind::kRmsNorm, .epsilon = 1e-6, .group_size = kNormDim, .gate_position = GatePosition::kNone};
  EXPECT_TRUE(Normalize(engine(), rms).ok());
  FeedForwardCall gated = CallOf(kGated);
  gated.said = {.form = FeedForwardForm::kGated,
                .activation = Activation::kSilu,
                .swish_beta = 1.25,
                .packing = GateUpPacking::kInterleaved,
                .layout = WeightLayout::kOutIn,
                .gate_max = 7,
                .up_limit = 6,
                .up_offset = 1,
                .inner_norm = InnerNorm{1e-6}};
  EXPECT_TRUE(FeedForward(engine(), gated).ok());
  gated.said = {.inner_norm = InnerNorm{}};
  EXPECT_TRUE(FeedForward(engine(), gated).ok());
}

TEST_P(LayersByNameContractTest, OptionsThatContradictANormAreRefused) {
  struct Case {
    const char* field;
    const char* text;
    NormalizeSaid said;
  };
  for (const Case& one : {
           Case{"spec.kind",
                "expected layer_norm as in models/contract/layers/norm, got rms_norm",
                {.kind = NormKind::kRmsNorm}},
           Case{"spec.epsilon",
                "expected 3e-05 as in models/contract/layers/norm, got 3.0000000000000004e-05",
                {.epsilon = 3.0000000000000004e-05}},
           Case{"spec.rounding",
                "expected before_gamma as in models/contract/layers/norm, got after_gamma",
                {.rounding = NormRounding::kAfterGamma}},
           Case{"spec.gamma_offset", "expected 1 as in models/contract/layers/norm, got 2", {.gamma_offset = 2}},
           Case{"spec.group_size", "expected 12 as in models/contract/layers/norm, got 24", {.group_size = 24}},
           Case{"spec.gate_position",
                "expected last as in models/contract/layers/norm, got first",
                {.gate_position = GatePosition::kFirst}},
           Case{"spec.normalized_axes", "expected 1 as in models/contract/layers/norm, got 2", {.normalized_axes = 2}},
       }) {
    NormalizeCall call = CallOf(kNorm, NormOfAllOptions());
    call.said = one.said;
    const absl::Status status = Normalize(engine(), call).status();
    ExpectError(status, absl::StatusCode::kInvalidArgument, "CONTRADICTS_LAYER", one.field);
    EXPECT_EQ(status.message(), absl::StrCat(one.field, ": ", one.text));
  }
  NormalizeCall rms = CallOf(kRmsNorm, PlainRmsNorm());
  rms.said.epsilon = 1e-5;
  EXPECT_EQ(Normalize(engine(), rms).status().message(),
            "spec.epsilon: expected 1e-06 as in models/contract/layers/rms_norm, got 1e-05");
}

TEST_P(LayersByNameContractTest, OptionsThatContradictAFeedForwardLayerAreRefused) {
  struct Case {
    const char* layer;
    const char* field;
    const char* is;
    const char* got;
    FeedForwardSaid said;
  };
  for (const Case& one : {
           Case{kGated, "spec.form", "gated", "plain", {.form = FeedForwardForm::kPlain}},
           Case{kGated, "spec.activation", "silu", "gelu", {.activation = Activation::kGelu}},
           Case{kGated, "spec.swish_beta", "1.25", "1", {.swish_beta = 1}},
           Case{kGated, "spec.packing", "interleaved", "halves", {.packing = GateUpPacking::kHalves}},
           Case{kGated, "spec.layout", "out_in", "in_out", {.layout = WeightLayout::kInOut}},
           Case{kGated, "spec.gate_max", "7", "6", {.gate_max = 6}},
           Case{kGated, "spec.up_limit", "6", "6.5", {.up_limit = 6.5}},
           Case{kGated, "spec.up_offset", "1", "2", {.up_offset = 2}},
           Case{kGated, "spec.inner_norm.epsilon", "1e-06", "0", {.inner_norm = InnerNorm{0.0}}},
           Case{kPlain, "spec.form", "plain", "gated", {.form = FeedForwardForm::kGated}},
           Case{kPlain, "spec.gate_max", "none", "7", {.gate_max = 7}},
           Case{kPlain, "spec.up_limit", "none", "7", {.up_limit = 7}},
           Case{kPlain, "spec.up_offset", "0", "1", {.up_offset = 1}},
           Case{kPlain, "spec.inner_norm", "none", "an inner norm", {.inner_norm = InnerNorm{}}},
       }) {
    FeedForwardCall call = CallOf(one.layer);
    call.said = one.said;
    const absl::Status status = FeedForward(engine(), call).status();
    ExpectError(status, absl::StatusCode::kInvalidArgument, "CONTRADICTS_LAYER", one.field);
    EXPECT_EQ(status.message(),
              absl::StrCat(one.field, ": expected ", one.is, " as in ", one.layer, ", got ", one.got));
  }
}

TEST_P(LayersByNameContractTest, WeightsBesideANameAreRefused) {
  NormalizeCall norm = CallOf(kRmsNorm, PlainRmsNorm());
  norm.inputs.gamma = SeededGamma(1, DType::kFloat32, kNormDim);
  ExpectError(Normalize(engine(), norm).status(), absl::StatusCode::kInvalidArgument, "TWO_SOURCES", "gamma");
  norm.inputs.beta = std::exchange(norm.inputs.gamma, std::nullopt);
  ExpectError(Normalize(engine(), norm).status(), absl::StatusCode::kInvalidArgument, "TWO_SOURCES", "beta");
  for (const auto& [role, member] : kFeedForwardRoles) {
    FeedForwardCall call = CallOf(kGated);
    call.weights.*member = SeededGamma(1, DType::kFloat32, 4);
    const absl::Status status = FeedForward(engine(), call).status();
    ExpectError(status, absl::StatusCode::kInvalidArgument, "TWO_SOURCES", absl::StrCat("weights.", std::string(role)));
    EXPECT_EQ(status.message(),
              absl::StrCat("weights.", std::string(role), ": expected no weights beside the name of a layer, got [4]"));
  }
}

TEST_P(LayersByNameContractTest, ALayerOfTheOtherKindIsRefused) {
  const absl::Status norm = Normalize(engine(), CallOf(kGated, PlainRmsNorm())).status();
  ExpectError(norm, absl::StatusCode::kInvalidArgument, "WRONG_KIND", "layer");
  EXPECT_EQ(norm.message(),
            "layer: expected a normalize layer, got models/contract/layers/gated, a feed-forward layer");
  ExpectError(FeedForward(engine(), CallOf(kNorm)).status(), absl::StatusCode::kInvalidArgument, "WRONG_KIND", "layer");
}

TEST_P(LayersByNameContractTest, InputOfAnotherWidthIsBlamedOnTheInput) {
  NormalizeCall norm = CallOf(kRmsNorm, PlainRmsNorm());
  norm.inputs.input = SeededInput(1, DType::kFloat32, {3, kNormDim + 1});
  norm.inputs.residual.reset();
  const absl::Status status = Normalize(engine(), norm).status();
  ExpectError(status, absl::StatusCode::kInvalidArgument, "SHAPE_MISMATCH", "input.shape");
  EXPECT_EQ(status.message(),
            "input.shape: expected the last dimension 24 as in models/contract/layers/rms_norm, got [3, 25]");
  FeedForwardCall layer = CallOf(kPlain);
  layer.input = SeededInput(1, DType::kFloat32, {kDim, 1});
  ExpectError(FeedForward(engine(), layer).status(), absl::StatusCode::kInvalidArgument, "SHAPE_MISMATCH",
              "input.shape");
  layer.input = SeededInput(1, DType::kFloat32, {});
  EXPECT_EQ(DetailsOf(FeedForward(engine(), layer).status()).field, "input.shape");
}

TEST_P(LayersByNameContractTest, WhatTheLayerNeedsOfTheCallIsStillAskedFor) {
  NormalizeCall norm = CallOf(kNorm, NormOfAllOptions());
  norm.inputs.gate.reset();
  ExpectError(Normalize(engine(), norm).status(), absl::StatusCode::kInvalidArgument, "MISSING", "gate");
}

TEST_P(LayersByNameContractTest, NamesThatNoLayerHasAreNotFound) {
  for (const std::string& name :
       {std::string("models/contract/layers/none"), std::string("models/none/layers/norm"), std::string("norm"),
        std::string("models/contract/layers/../layers/norm"), std::string("models/contract/layers/%6eorm"),
        std::string("models/contract/layers/norm\0", 28), std::string(20000, 'x')}) {
    for (const absl::Status& one :
         {Normalize(engine(), CallOf(name, PlainRmsNorm())).status(), FeedForward(engine(), CallOf(name)).status()}) {
      ExpectError(one, absl::StatusCode::kNotFound, "LAYER_NOT_FOUND", "layer");
      EXPECT_EQ(DetailsOf(one).resource_type, "layer");
      EXPECT_LE(one.message().size(), 300u);
    }
  }
}

TEST_P(LayersByNameContractTest, DamagedLayersSayWhatIsWrong) {
  NormalizeCall call = CallOf(kDamaged, PlainRmsNorm());
  const absl::Status status = Normalize(engine(), call).status();
  ExpectError(status, absl::StatusCode::kFailedPrecondition, "LAYER_DAMAGED", "layer");
  EXPECT_EQ(status.message(), "layer: its file is damaged");
}

TEST_P(LayersByNameContractTest, ExpiredAndCancelledCallsByNameAreNotBegun) {
  NormalizeCall late = CallOf(kRmsNorm, PlainRmsNorm());
  late.context.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_EQ(Normalize(engine(), late).status().code(), absl::StatusCode::kDeadlineExceeded);
  FeedForwardCall unwanted = CallOf(kPlain);
  unwanted.context.cancelled = std::make_shared<std::atomic<bool>>(true);
  EXPECT_EQ(FeedForward(engine(), unwanted).status().code(), absl::StatusCode::kCancelled);
}

TEST_P(LayersByNameContractTest, CallsByNameAtOnceGetEachTheirOwnAnswer) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    callers.emplace_back([&, seed] {
      const char* const name = seed % 2 == 0 ? kGated : kPlain;
      FeedForwardCall call = CallOf(name);
      call.input = SeededInput(seed, DType::kFloat32, {4, kDim});
      const auto expected = FeedForward(engine(), Inline(call, seed % 2 == 0 ? GatedOfAllOptions() : PlainLayer()));
      for (int i = 0; i < 25; ++i) {
        const auto got = FeedForward(engine(), call);
        if (!got.ok() || !expected.ok() || !SameBits(got->outputs.output, expected->outputs.output)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace

ContractLayers::ContractLayers() {
  catalog_.Put(kNorm, NormOfAllOptions());
  catalog_.Put(kRmsNorm, PlainRmsNorm());
  catalog_.Put(kGated, GatedOfAllOptions());
  catalog_.Put(kPlain, PlainLayer());
  catalog_.Put(kInt8, Int8Layer());
  auto damaged = std::make_shared<MemoryRecord>(kDamaged, PlainRmsNorm());
  damaged->mutable_info().status =
      WithDetails(absl::StatusCode::kFailedPrecondition, "its file is damaged", {.reason = "LAYER_DAMAGED"});
  catalog_.Put(damaged);
}

}  // namespace layerd
