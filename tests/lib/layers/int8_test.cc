// Feed-forward layers with int8 matrices: what is taken and what is refused, and what comes out.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/errors.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/layer.h"
#include "lib/layers/packed_feed_forward.h"
#include "lib/layers/seeded.h"
#include "lib/reference/judge.h"
#include "lib/reference/reference.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {
namespace {

std::vector<FeedForwardSpec> Forms() {
  std::vector<FeedForwardSpec> forms = {ReluSpec()};
  for (const GateUpPacking packing : {GateUpPacking::kSeparate, GateUpPacking::kHalves, GateUpPacking::kInterleaved}) {
    forms.push_back(SwiGluSpec());
    forms.back().packing = packing;
    forms.back().inner_norm = InnerNorm{};
  }
  return forms;
}

TEST(Int8Test, EveryFormKeepsTheContractAndHasTheBitsOfItsValuesInFloat32) {
  const Arena arena(2);
  for (const FeedForwardSpec& spec : Forms()) {
    for (const auto& [dim, hidden_dim] : {std::pair(20, 37), std::pair(64, 96), std::pair(33, 300), std::pair(1, 1)}) {
      SCOPED_TRACE(testing::Message() << "packing " << static_cast<int>(spec.packing) << " form "
                                      << static_cast<int>(spec.form) << " " << dim << " " << hidden_dim);
      const FeedForwardWeights weights = SeededInt8Weights(7, spec, dim, hidden_dim, /*biases=*/true);
      const Tensor input = SeededInput(7, DType::kFloat32, {5, dim});
      const auto outputs = FeedForward(arena, spec, weights, input, std::nullopt, true);
      ASSERT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_TRUE(JudgeFeedForward(spec, weights, input, *outputs).within_contract);
      const auto wide = FeedForward(arena, spec, Dequantized(weights), input, std::nullopt, false);
      ASSERT_TRUE(wide.ok()) << wide.status();
      EXPECT_TRUE(SameBits(outputs->output, wide->output));

      const PackedFeedForward packed = PackedFeedForward::Of(arena, spec, weights);
      const auto from_panels = FeedForward(arena, packed, input, std::nullopt, false);
      ASSERT_TRUE(from_panels.ok()) << from_panels.status();
      EXPECT_TRUE(SameBits(outputs->output, from_panels->output));
      const FeedForwardWeights unpacked = packed.Unpacked();
      for (const auto& [name, matrix, scale] : kFeedForwardMatrices) {
        ASSERT_EQ((unpacked.*matrix).has_value(), (weights.*matrix).has_value()) << name;
        if (!(weights.*matrix)) continue;
        EXPECT_TRUE(SameBits(*(unpacked.*matrix), *(weights.*matrix))) << name;
        EXPECT_TRUE(SameBits(*(unpacked.*scale), *(weights.*scale))) << name;
      }
    }
  }
}

TEST(Int8Test, TheJudgeSeesAScaleThatIsAnotherOne) {
  const Arena arena(1);
  const FeedForwardSpec spec = SwiGluSpec();
  const Tensor input = SeededInput(3, DType::kFloat32, {2, 40});
  const FeedForwardWeights weights = SeededInt8Weights(3, spec, 40, 50, false);
  const auto outputs = FeedForward(arena, spec, weights, input, std::nullopt, true);
  ASSERT_TRUE(outputs.ok());
  for (const auto& [name, matrix, scale] : kFeedForwardMatrices) {
    if (!(weights.*scale)) continue;
    FeedForwardWeights other = weights;
    std::vector<float> scales = (other.*scale)->ToFloats();
    scales[3] *= 1.01f;
    other.*scale = Tensor::FromFloats(DType::kFloat16, (other.*scale)->shape(), scales);
    EXPECT_FALSE(JudgeFeedForward(spec, other, input, *outputs).within_contract) << name;
  }
}

TEST(Int8Test, TheReferenceTakesScaleTimesValueExactly) {
  // 33 inputs: the second block has one. 2⁻²⁴ is the least scale, 65504 the largest.
  std::vector<float> q(2 * 33, 0.0f);
  q[0] = -128, q[31] = 127, q[32] = 5, q[33] = 1, q[33 + 32] = -3;
  const Tensor values = Tensor::FromFloats(DType::kInt8, {2, 33}, q);
  const Tensor scale = Tensor::FromFloats(DType::kFloat16, {2, 2}, {0x1p-24f, 65504.0f, 0.333251953125f, -2.0f});
  const std::vector<double> x(33, 1.0);
  const auto product = reference::Product(x, 1, values, WeightLayout::kOutIn, std::nullopt, scale);
  EXPECT_EQ(product.value, (std::vector<double>{-0x1p-24 + 5 * 65504.0, 0.333251953125 + 6.0}));
  EXPECT_EQ(product.magnitude, (std::vector<double>{255 * 0x1p-24 + 5 * 65504.0, 0.333251953125 + 6.0}));
}

TEST(Int8Test, ScalesThatAreNotFiniteFollowIeee) {
  const Arena arena(1);
  FeedForwardSpec spec = ReluSpec();
  spec.activation = {Activation::kIdentity};
  FeedForwardWeights weights;
  weights.up = Tensor::FromFloats(DType::kInt8, {4, 1}, {1, 0, -2, 3});
  const float infinity = std::numeric_limits<float>::infinity();
  weights.up_scale = Tensor::FromFloats(DType::kFloat16, {4, 1}, {infinity, infinity, infinity, -0.5f});
  weights.down = Tensor::FromFloats(DType::kFloat32, {1, 4}, {1, 1, 1, 1});
  const Tensor input = Tensor::FromFloats(DType::kFloat32, {1, 1}, {2});
  const auto outputs = FeedForward(arena, spec, weights, input, std::nullopt, true);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  EXPECT_EQ(outputs->up->At(0), infinity);
  EXPECT_TRUE(std::isnan(outputs->up->At(1)));
  EXPECT_EQ(outputs->up->At(2), -infinity);
  EXPECT_EQ(outputs->up->At(3), -3.0f);
  EXPECT_TRUE(JudgeFeedForward(spec, weights, input, *outputs).within_contract);
}

TEST(Int8Test, MatricesMayEachHaveADtypeOfTheirOwn) {
  const Arena arena(1);
  const FeedForwardSpec spec = SwiGluSpec();
  FeedForwardWeights weights = SeededInt8Weights(3, spec, 40, 50, false);
  weights.up = SeededTensor(3, "up", DType::kBFloat16, {50, 40}, 0.2);
  weights.up_scale.reset();
  const Tensor input = SeededInput(3, DType::kBFloat16, {2, 40});
  const auto outputs = FeedForward(arena, spec, weights, input, std::nullopt, true);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  EXPECT_EQ(outputs->output.dtype(), DType::kBFloat16);
  EXPECT_TRUE(JudgeFeedForward(spec, weights, input, *outputs).within_contract);
}

struct BadLayer {
  const char* name;
  const char* field;
  const char* text;
  std::function<void(FeedForwardSpec&, FeedForwardWeights&)> spoil;
};

TEST(Int8Test, WhatDoesNotFitIsRefusedByField) {
  const std::vector<BadLayer> bad = {
      {"no scales", "weights.gate_scale", "expected scales, float16 [12, 2], since weights.gate is int8, got nothing",
       [](auto&, auto& w) { w.gate_scale.reset(); }},
      {"no scales of down", "weights.down_scale", "expected scales, float16 [40, 1], since weights.down is int8",
       [](auto&, auto& w) { w.down_scale.reset(); }},
      {"scales of a float matrix", "weights.up_scale", "expected nothing, since weights.up is bfloat16",
       [](auto&, auto& w) {
         w.up = Tensor::Allocate(DType::kBFloat16, {12, 40});
       }},
      {"scales without a matrix", "weights.gate_up_scale", "expected nothing, since there is no weights.gate_up",
       [](auto&, auto& w) { w.gate_up_scale = w.gate_scale; }},
      {"a scale for each output", "weights.gate_scale.shape",
       "expected [12, 2], one for each 32 inputs of weights.gate [12, 40], got [12]",
       [](auto&, auto& w) { w.gate_scale = Tensor::Allocate(DType::kFloat16, {12}); }},
      {"too few blocks", "weights.gate_scale.shape", "expected [12, 2]",
       [](auto&, auto& w) {
         w.gate_scale = Tensor::Allocate(DType::kFloat16, {12, 1});
       }},
      {"transposed scales", "weights.gate_scale.shape", "got [2, 12]",
       [](auto&, auto& w) {
         w.gate_scale = Tensor::Allocate(DType::kFloat16, {2, 12});
       }},
      {"float32 scales", "weights.up_scale.dtype", "expected float16, got float32",
       [](auto&, auto& w) {
         w.up_scale = Tensor::Allocate(DType::kFloat32, {12, 2});
       }},
      {"int8 scales", "weights.up_scale.dtype", "expected float16, got int8",
       [](auto&, auto& w) {
         w.up_scale = Tensor::Allocate(DType::kInt8, {12, 2});
       }},
      {"the other layout", "weights.gate.dtype",
       "expected float32, float16 or bfloat16 for layout IN_OUT, got int8, which OUT_IN alone has",
       [](auto& s, auto& w) {
         s.layout = WeightLayout::kInOut;
         w.gate = Tensor::Allocate(DType::kInt8, {40, 12});
         w.up = Tensor::Allocate(DType::kInt8, {40, 12});
         w.down = Tensor::Allocate(DType::kInt8, {12, 40});
       }},
      {"int8 bias", "weights.gate_bias.dtype", "expected float32, float16 or bfloat16, got int8",
       [](auto&, auto& w) { w.gate_bias = Tensor::Allocate(DType::kInt8, {12}); }},
      {"int8 gamma", "weights.inner_norm_gamma.dtype", "got int8",
       [](auto& s, auto& w) {
         s.inner_norm.emplace();
         w.inner_norm_gamma = Tensor::Allocate(DType::kInt8, {12});
       }},
      {"a matrix of another width", "weights.up.shape", "h of weights.gate = 12",
       [](auto&, auto& w) {
         w.up = Tensor::Allocate(DType::kInt8, {11, 40});
       }},
  };
  for (const BadLayer& one : bad) {
    FeedForwardSpec spec = SwiGluSpec();
    FeedForwardWeights weights = SeededInt8Weights(1, spec, 40, 12, false);
    const Tensor input = SeededInput(1, DType::kFloat32, {2, 40});
    ASSERT_TRUE(CheckFeedForward(spec, weights, input).ok());
    one.spoil(spec, weights);
    const absl::Status status = CheckFeedForward(spec, weights, input).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << one.name;
    EXPECT_EQ(DetailsOf(status).field, one.field) << one.name << ": " << status;
    EXPECT_NE(std::string(status.message()).find(one.text), std::string::npos) << one.name << ": " << status;
  }
}

TEST(Int8Test, ALayerHasItsScalesBesideItsMatricesAndCountsThemAsBytesOnly) {
  FeedForwardLayer layer;
  layer.weights = SeededInt8Weights(1, layer.spec, 40, 12, /*biases=*/true);
  const auto extent = CheckLayer(layer);
  ASSERT_TRUE(extent.ok()) << extent.status();
  EXPECT_EQ(extent->dim, 40);
  EXPECT_EQ(extent->hidden_dim, 12);
  EXPECT_EQ(extent->parameters, 3 * 12 * 40 + 2 * 12 + 40);
  EXPECT_EQ(extent->weight_bytes, 3 * 12 * 40 + 2 * (2 * 12 * 2 + 40 * 1) + 4 * (2 * 12 + 40));
  std::vector<std::string> roles;
  for (const auto& [role, tensor] : WeightsOf(layer)) roles.emplace_back(role);
  EXPECT_EQ(roles, (std::vector<std::string>{"gate", "gate_scale", "up", "up_scale", "down", "down_scale", "gate_bias",
                                             "up_bias", "down_bias"}));
  EXPECT_TRUE(IsScale("down_scale"));
  EXPECT_FALSE(IsScale("down") || IsScale("_scale") || IsScale("down_bias"));
}

}  // namespace
}  // namespace layerd
