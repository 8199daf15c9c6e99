#include "client/layer_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {
namespace {

using testing::HasSubstr;
using testing::Not;

LayerListing Uploaded() {
  FeedForwardLayer layer{.spec = SwiGluSpec()};
  layer.weights = SeededFeedForwardWeights(1, layer.spec, DType::kBFloat16, 4, 6, /*biases=*/false);
  layer.weights.down_bias = SeededBeta(1, DType::kFloat32, 4);
  LayerListing listing;
  listing.info.name = "models/m/layers/mlp";
  listing.info.uploaded = true;
  listing.info.outline = OutlineOf(layer);
  listing.info.extent = *CheckLayer(layer);
  listing.info.content_hash = std::string(64, 'c');
  listing.info.weights_sha256 = std::string(64, 'd');
  listing.info.create_time = absl::FromUnixMillis(1700000000500);
  return listing;
}

LayerListing OfCheckpoint() {
  NormalizeLayer layer{.spec = {.kind = NormKind::kLayerNorm, .rounding = NormRounding::kAfterGamma}};
  layer.weights.gamma = SeededGamma(1, DType::kFloat32, 4);
  LayerListing listing;
  listing.info.name = "models/m/layers/norm";
  listing.info.outline = OutlineOf(layer);
  listing.info.extent = *CheckLayer(layer);
  listing.info.tensors = {{"gamma", "model.norm\x1b[31m.weight"}};
  listing.info.inferred = {{"epsilon", "1e-05", "config.json layer_norm_eps"}};
  return listing;
}

LayerListing Damaged() {
  LayerListing listing;
  listing.info.name = "models/m/layers/damaged";
  listing.info.status =
      WithDetails(absl::StatusCode::kFailedPrecondition, "the tensor \"x\" is too short", {.reason = "LAYER_DAMAGED"});
  return listing;
}

TEST(LayerTextTest, TheTableHasColumnsAsWideAsTheyNeed) {
  EXPECT_EQ(LayerTable({Uploaded(), OfCheckpoint(), Damaged()}),
            "name                     kind        dim  hidden  dtype             size   state\n"
            "models/m/layers/mlp      gated silu  4    6       bfloat16+float32  160 B  usable\n"
            "models/m/layers/norm     layer_norm  4    -       float32           16 B   usable\n"
            "models/m/layers/damaged  -           -    -       -                 -      unusable: LAYER_DAMAGED\n");
  EXPECT_EQ(LayerTable({}), "name  kind  dim  hidden  dtype  size  state\n");
}

TEST(LayerTextTest, StatesAreTold) {
  LayerListing listing = Uploaded();
  listing.prepared = true;
  EXPECT_EQ(StateText(listing), "prepared");
  listing.pinned = true;
  EXPECT_EQ(StateText(listing), "pinned");
  listing.prepared = false;
  EXPECT_EQ(StateText(listing), "pinned, not prepared");
  listing.warning = "newer files cannot be used";
  EXPECT_EQ(StateText(listing), "pinned, not prepared, warning");
}

TEST(LayerTextTest, JsonHasTheFieldsOfTheMessage) {
  const OrderedJson upload = LayerToJson(Uploaded());
  EXPECT_EQ(upload["name"], "models/m/layers/mlp");
  EXPECT_EQ(upload["feed_forward"]["activation"], "silu");
  EXPECT_EQ(upload["weights"][0].dump(), R"({"role":"gate","dtype":"bfloat16","shape":[6,4],"tensor":"gate"})");
  EXPECT_EQ(upload["hidden_dim"], 6);
  EXPECT_EQ(upload["parameters"], 76);
  EXPECT_EQ(upload["weight_bytes"], 160);
  EXPECT_EQ(upload["content_hash"], std::string(64, 'c'));
  EXPECT_EQ(upload["etag"], std::string(64, 'c'));
  EXPECT_EQ(upload["sha256"], std::string(64, 'd'));
  EXPECT_EQ(upload["source"], "upload");
  EXPECT_EQ(upload["create_time"], "2023-11-14T22:13:20.5Z");
  EXPECT_EQ(upload["prepared"], false);
  EXPECT_FALSE(upload.contains("problem"));

  const OrderedJson norm = LayerToJson(OfCheckpoint());
  EXPECT_EQ(norm["normalize"]["epsilon"], 1e-5) << "defaults are filled in";
  EXPECT_EQ(norm["source"], "checkpoint");
  EXPECT_FALSE(norm.contains("etag"));
  EXPECT_FALSE(norm.contains("content_hash")) << "not known yet";
  EXPECT_EQ(norm["inferences"].dump(),
            R"([{"option":"epsilon","value":"1e-05","source":"config.json layer_norm_eps"}])");

  const OrderedJson damaged = LayerToJson(Damaged());
  EXPECT_EQ(damaged["problem"]["reason"], "LAYER_DAMAGED");
  EXPECT_FALSE(damaged.contains("weights"));
}

LayerListing Quantised() {
  FeedForwardLayer layer;
  layer.weights = SeededInt8Weights(1, layer.spec, 40, 6, /*biases=*/false);
  layer.weights.down_bias = SeededBeta(1, DType::kBFloat16, 40);
  layer.quantization = {.source_hash = std::string(64, 'e'),
                        .matrices = {{"gate", 0.00512345, 0.25}, {"up", 0.5, 1e-9}, {"down", 0, 0}},
                        .output_relative_rms_error = 0.0076,
                        .rows = 16,
                        .seed = 3};
  LayerListing listing;
  listing.info.name = "models/m/layers/int8";
  listing.info.uploaded = true;
  listing.info.outline = OutlineOf(layer);
  listing.info.extent = *CheckLayer(layer);
  return listing;
}

TEST(LayerTextTest, TellsHowFarAnInt8LayerIsFromWhatItWas) {
  const LayerListing listing = Quantised();
  const std::string errors =
      "  weights of gate  relative rms error 0.00512  max abs error 0.25\n"
      "  weights of up    relative rms error 0.5      max abs error 1e-09\n"
      "  weights of down  relative rms error 0        max abs error 0\n"
      "  output           relative rms error 0.0076   for 16 rows of seed 3\n";
  EXPECT_EQ(QuantizationText(listing.info.outline), errors);
  const std::string text = LayerDescription(listing);
  EXPECT_THAT(text, HasSubstr("quantization\n" + errors));
  EXPECT_THAT(text, HasSubstr("quantized_from  " + std::string(64, 'e')));
  EXPECT_THAT(text, HasSubstr("; d 40, h 6; BF16, I8\n"));
  EXPECT_THAT(LayerTable({listing}), HasSubstr("  bfloat16+int8  ")) << "scales belong to their matrices";
  EXPECT_EQ(LayerToJson(listing)["quantization"].dump(),
            R"({"source_hash":")" + std::string(64, 'e') +
                R"(","matrices":[{"role":"gate","relative_rms_error":0.00512345,"max_abs_error":0.25},)"
                R"({"role":"up","relative_rms_error":0.5,"max_abs_error":1e-09},)"
                R"({"role":"down","relative_rms_error":0.0,"max_abs_error":0.0}],)"
                R"("output_relative_rms_error":0.0076,"rows":16,"seed":3})");
  EXPECT_EQ(QuantizationText(Uploaded().info.outline), "");
  EXPECT_FALSE(LayerToJson(Uploaded()).contains("quantization"));
  LayerListing unknown = listing;
  std::get<FeedForwardLayer>(unknown.info.outline).quantization->output_relative_rms_error.reset();
  EXPECT_THAT(QuantizationText(unknown.info.outline), HasSubstr("relative rms error unknown: it is not finite"));
  EXPECT_FALSE(LayerToJson(unknown)["quantization"].contains("output_relative_rms_error"));
}

TEST(LayerTextTest, JsonIsUtf8WhateverIsInIt) {
  EXPECT_EQ(JsonLine({{"name", "a\xff"}}), "{\"name\":\"a\xEF\xBF\xBD\"}\n");
}

TEST(LayerTextTest, TheDescriptionTellsAllAndNoControlCharacters) {
  const std::string upload = LayerDescription(Uploaded());
  for (const char* part : {"models/m/layers/mlp\n", "usable", "76", "160", "cccc", "dddd", "2023-11-14T22:13:20.5Z",
                           "feed_forward\n", "silu", "out_in", "down_bias  float32   [4]", "[6, 4]"}) {
    EXPECT_THAT(upload, HasSubstr(part));
  }
  const std::string norm = LayerDescription(OfCheckpoint());
  EXPECT_THAT(norm, HasSubstr("model.norm?[31m.weight"));
  EXPECT_THAT(norm, Not(HasSubstr("\x1b")));
  EXPECT_THAT(norm, HasSubstr("epsilon  1e-05  config.json layer_norm_eps"));
  EXPECT_THAT(LayerDescription(Damaged()), HasSubstr("the tensor \"x\" is too short"));
}

}  // namespace
}  // namespace layerd
