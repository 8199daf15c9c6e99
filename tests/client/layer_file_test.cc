#include "client/layer_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "lib/layers/seeded.h"
#include "lib/weights/layer_hash.h"
#include "lib/weights/safetensors.h"
#include "lib/weights/spec_json.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {
namespace {

using testing::HasSubstr;

std::string TemporaryFile(const std::string& name) {
  return testing::TempDir() + "layer_file_" + std::to_string(getpid()) + "_" + name;
}

Layer SeededGatedLayer() {
  FeedForwardLayer layer;
  layer.spec.packing = GateUpPacking::kInterleaved;
  layer.spec.layout = WeightLayout::kInOut;
  layer.spec.activation = {Activation::kSilu, 1.702};
  layer.spec.gate_max = 7;
  layer.spec.up_limit = 0.1;
  layer.spec.up_offset = 1;
  layer.spec.inner_norm = InnerNorm{1e-7};
  layer.weights = SeededFeedForwardWeights(3, layer.spec, DType::kBFloat16, 6, 10, /*biases=*/true);
  layer.weights.inner_norm_gamma = SeededGamma(3, DType::kFloat32, 10);  // dtypes differ
  return layer;
}

Layer SeededNorm() {
  NormalizeLayer layer;
  layer.spec = {.kind = NormKind::kLayerNorm, .epsilon = 0.1, .rounding = NormRounding::kAfterGamma, .gamma_offset = 1};
  layer.weights = {SeededGamma(3, DType::kFloat16, 6), SeededBeta(3, DType::kFloat32, 6)};
  return layer;
}

TEST(LayerFileTest, WhatIsWrittenIsReadBackToTheBit) {
  for (const Layer& layer : {SeededGatedLayer(), SeededNorm()}) {
    const std::string path = TemporaryFile("whole.safetensors");
    ASSERT_TRUE(WriteLayerFile(path, layer).ok());
    const auto back = ReadLayer(path, "", {});
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(ContentHash(*back), ContentHash(layer)) << "options and weights";
    unlink(path.c_str());
  }
}

TEST(LayerFileTest, AnInt8LayerKeepsItsError) {
  FeedForwardLayer layer;
  layer.weights = SeededInt8Weights(3, layer.spec, 40, 10, /*biases=*/true);
  const std::string path = TemporaryFile("int8.safetensors");
  for (const bool told : {false, true}) {
    if (told) {
      layer.quantization = {.source_hash = std::string(64, 'a'),
                            .matrices = {{"gate", 0.1, 0.2}, {"up", 0.3, 0.4}, {"down", 1e-300, 0}},
                            .output_relative_rms_error = 0.0071,
                            .rows = 16,
                            .seed = 1};
    }
    ASSERT_TRUE(WriteLayerFile(path, layer).ok());
    const auto back = ReadLayer(path, "", {});
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(ContentHash(*back), ContentHash(layer));
    EXPECT_TRUE(std::get<FeedForwardLayer>(*back).quantization == layer.quantization);
  }
  for (const std::string text : {"", "{", "{}", R"({"source_hash": 1})"}) {
    std::map<std::string, Tensor> tensors;
    for (const auto& [role, tensor] : WeightsOf(layer)) tensors.emplace(role, tensor);
    ASSERT_TRUE(WriteSafetensors(path, tensors, {{kSpecKey, SpecToJson(layer).dump()}, {kQuantizationKey, text}}).ok());
    EXPECT_EQ(ReadLayer(path, "", {}).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  unlink(path.c_str());
}

TEST(LayerFileTest, AFileThatDoesNotTellItsOnlyLayerNeedsAPrefix) {
  const std::string path = TemporaryFile("plain.safetensors");
  ASSERT_TRUE(WriteSafetensors(path, {{"gamma", SeededGamma(1, DType::kFloat32, 4)}}).ok());
  EXPECT_THAT(std::string(ReadLayer(path, "", {}).status().message()), HasSubstr("--prefix"));
  EXPECT_THAT(std::string(ReadLayer(testing::TempDir(), "", {}).status().message()), HasSubstr("--prefix"));
  unlink(path.c_str());
}

TEST(LayerFileTest, DamageIsToldAndNoLayer) {
  const std::string path = TemporaryFile("damaged.safetensors");
  const std::map<std::string, Tensor> gamma = {{"gamma", SeededGamma(1, DType::kFloat32, 4)}};
  for (const std::string spec : {"", "{", "{}", R"({"normalize": {}})", R"({"normalize": {"kind": "x"}})",
                                 R"({"feed_forward": {"form": "gated"}})"}) {
    ASSERT_TRUE(WriteSafetensors(path, gamma, {{kSpecKey, spec}}).ok());
    EXPECT_EQ(ReadLayer(path, "", {}).status().code(), absl::StatusCode::kInvalidArgument) << spec;
  }
  ASSERT_TRUE(WriteSafetensors(path, {{"delta", SeededGamma(1, DType::kFloat32, 4)}},
                               {{kSpecKey, R"({"normalize": {"kind": "rms_norm"}})"}})
                  .ok());
  EXPECT_THAT(std::string(ReadLayer(path, "", {}).status().message()), HasSubstr("weights.delta"));
  unlink(path.c_str());
  EXPECT_EQ(ReadLayer(path, "", {}).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace layerd
