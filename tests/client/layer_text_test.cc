#include "client/layer_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lib/base/errors.h"
#include "lib/layers/seeded.h"

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
