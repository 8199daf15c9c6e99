// layerd.json: layers that are described.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/layers/seeded.h"
#include "tests/lib/weights/checkpoint_files.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;
using Descriptions = std::map<std::string, std::string>;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::string Entries(const std::string& entries) { return "{\"layers\":[" + entries + "]}"; }

const std::string kNorm =
    R"({"layer":"layers.{i}.ln1","normalize":{"kind":"layer_norm","epsilon":9.999999974752427e-07,)"
    R"("rounding":"after_gamma"},"weights":{"gamma":"layers.{i}.ln1.weight","beta":"layers.{i}.ln1.bias"}})";
const std::string kFfn =
    R"({"layer":"layers.{i}.ffn","feed_forward":{"form":"plain","activation":"gelu_tanh","layout":"out_in"},)"
    R"("weights":{"up":"layers.{i}.fc1.weight","up_bias":"layers.{i}.fc1.bias","down":"layers.{i}.fc2.weight"}})";

Shapes Kwt(const std::string& i) {
  return {{"layers." + i + ".ln1.weight", {4}},
          {"layers." + i + ".ln1.bias", {4}},
          {"layers." + i + ".fc1.weight", {6, 4}},
          {"layers." + i + ".fc1.bias", {6}},
          {"layers." + i + ".fc2.weight", {4, 6}}};
}

TEST(CheckpointDescription, OneLayerForEachNumber) {
  const Model model(Kwt("0") + Kwt("1") + Kwt("11") + Kwt("x") + Kwt("") + Kwt("1.1") + Kwt("-1") + Kwt("1234567890"),
                    "", Entries(kNorm + "," + kFfn));
  const auto checkpoint = model.Open();
  const std::string norm = "layer_norm, bias; eps 9.999999974752427e-07; after_gamma; d 4; F32";
  const std::string ffn = "plain: up, down [out, in], biases; gelu_tanh; d 4, h 6; F32";
  EXPECT_EQ(Described(checkpoint), (Descriptions{{"layers.0.ln1", norm},
                                                 {"layers.1.ln1", norm},
                                                 {"layers.11.ln1", norm},
                                                 {"layers.0.ffn", ffn},
                                                 {"layers.1.ffn", ffn},
                                                 {"layers.11.ffn", ffn}}));
  EXPECT_EQ(checkpoint->family(), "layerd.json");
  EXPECT_THAT(InferredOf(checkpoint, "layers.11.ffn"), ElementsAre("options: as described (layerd.json: layers[1])"));
  const auto layer = (*checkpoint->Find("layers.11.ffn"))->Read();
  EXPECT_TRUE(SameBits(WeightOf(layer, "up"), TensorNamed("layers.11.fc1.weight", {6, 4})));
  EXPECT_TRUE(SameBits(WeightOf(layer, "up_bias"), TensorNamed("layers.11.fc1.bias", {6})));
  EXPECT_EQ(std::get<FeedForwardLayer>(*layer).weights.down_bias, std::nullopt);
}

TEST(CheckpointDescription, EveryOption) {
  const Model model(
      {{"g", {8, 4}}, {"b", {8}}, {"d", {3, 4}}, {"i", {4}}, {"n", {4}}}, "",
      Entries(R"({"layer":"f","feed_forward":{"form":"gated","packing":"interleaved","activation":"silu","swish_beta":2,
                  "layout":"out_in","gate_max":7,"up_limit":8,"up_offset":1,"inner_norm":{"epsilon":0.5}},
                  "weights":{"gate_up":"g","gate_up_bias":"b","down":"d","inner_norm_gamma":"i"}},
                 {"layer":"n","normalize":{"kind":"rms_norm","epsilon":0,"rounding":"before_gamma","gamma_offset":1,
                  "group_size":2,"gate_position":"last"},"weights":{"gamma":"n"}})"));
  EXPECT_EQ(Described(model.Open()),
            (Descriptions{{"f",
                           "gated: gate_up in turns, down [out, in], biases, inner norm; silu with beta 2; gate at "
                           "most 7; up within 8; up + 1; d 4, h 4, out 3; F32"},
                          {"n", "rms_norm; eps 0.0; before_gamma; gamma + 1; groups of 2; gate last; d 4; F32"}}));
}

// fc1 and fc2 in int8 with their scales, by the names that `scale` makes.
void WriteInt8(const std::string& path, bool scales) {
  std::map<std::string, Tensor> tensors = {{"fc1.q", SeededTensor(1, "up", DType::kInt8, {6, 40}, 128)},
                                           {"fc2.q", SeededTensor(1, "down", DType::kInt8, {40, 6}, 128)}};
  if (scales) {
    tensors.emplace("fc1.s", SeededTensor(1, "up_scale", DType::kFloat16, {6, 2}, 0.1));
    tensors.emplace("fc2.s", SeededTensor(1, "down_scale", DType::kFloat16, {40, 1}, 0.1));
  }
  EXPECT_TRUE(WriteSafetensors(path, tensors).ok());
}

TEST(CheckpointDescription, Int8MatricesHaveTheirScalesBesideThem) {
  const std::string start =
      R"({"layer":"ffn","feed_forward":{"form":"plain","activation":"relu","layout":"out_in"},"weights":{"up":"fc1.q",)";
  const Model model({}, "", Entries(start + R"("up_scale":"fc1.s","down":"fc2.q","down_scale":"fc2.s"}})"));
  WriteInt8(model.folder().File("model.safetensors"), true);
  EXPECT_EQ(Described(model.Open()), (Descriptions{{"ffn", "plain: up, down [out, in]; relu; d 40, h 6; I8"}}));
  const auto layer = (*model.Open()->Find("ffn"))->Read();
  EXPECT_TRUE(SameBits(WeightOf(layer, "down_scale"), SeededTensor(1, "down_scale", DType::kFloat16, {40, 1}, 0.1)));
  EXPECT_EQ(CheckLayer(*layer)->parameters, 2 * 6 * 40);

  // Whose scales nobody names, or that has none, is listed and cannot be used.
  model.folder().Write("layerd.json", Entries(start + R"("down":"fc2.q","down_scale":"fc2.s"}})"));
  ExpectUnusable(StatusOf(model.Open(), "ffn"), "LAYER_INCOMPLETE",
                 {"tensor \"fc1.q\": weights.up_scale: expected scales, float16 [6, 2], since weights.up is int8"});
  model.folder().Write("layerd.json", Entries(start + R"("up_scale":"fc2.s","down":"fc2.q","down_scale":"fc2.s"}})"));
  ExpectUnusable(StatusOf(model.Open(), "ffn"), "LAYER_DAMAGED",
                 {"tensor \"fc2.s\": weights.up_scale.shape: expected [6, 2]"});
  WriteInt8(model.folder().File("model.safetensors"), false);
  ExpectUnusable(StatusOf(model.Open(), "ffn"), "LAYER_INCOMPLETE", {"there is no tensor \"fc2.s\""});
}

TEST(CheckpointDescription, GoesOverTheFamilyForItsOwnLayers) {
  const Shapes shapes = {{"model.norm.weight", {4}}, {"model.layers.0.input_layernorm.weight", {4}}, {"extra", {4}}};
  const Model model(shapes, R"({"model_type":"llama"})",
                    Entries(R"({"layer":"model.norm","normalize":{"kind":"layer_norm","rounding":"after_gamma"},
                                "weights":{"gamma":"model.norm.weight","beta":"extra"}})"));
  const auto checkpoint = model.Open();
  EXPECT_EQ(Described(checkpoint),
            (Descriptions{{"model.norm", "layer_norm, bias; eps 1e-05; after_gamma; d 4; F32"},
                          {"model.layers.0.input_layernorm", "rms_norm; eps 1e-06; before_gamma; d 4; F32"}}));
  EXPECT_EQ(checkpoint->family(), "llama");
  // The caller knows better still.
  EXPECT_EQ(Described(model.Open({.norm_epsilon = 0.5}))["model.norm"],
            "layer_norm, bias; eps 0.5; after_gamma; d 4; F32");
}

TEST(CheckpointDescription, WhatALayerLacksSpoilsOnlyThatLayer) {
  Shapes shapes = Kwt("0") + Kwt("1") + Kwt("2");
  shapes.erase("layers.1.fc2.weight");
  shapes["layers.2.fc1.bias"] = {5};
  const auto checkpoint = Model(shapes, "", Entries(kNorm + "," + kFfn)).Open();
  EXPECT_TRUE(StatusOf(checkpoint, "layers.0.ffn").ok());
  EXPECT_TRUE(StatusOf(checkpoint, "layers.1.ln1").ok());
  ExpectUnusable(StatusOf(checkpoint, "layers.1.ffn"), "LAYER_INCOMPLETE", {"no tensor \"layers.1.fc2.weight\""});
  ExpectUnusable(StatusOf(checkpoint, "layers.2.ffn"), "LAYER_DAMAGED", {"tensor \"layers.2.fc1.bias\"", "got [5]"});
}

TEST(CheckpointDescription, MistakesAreRefusedWithTheirPlace) {
  const auto norm = [](const std::string& layer, const std::string& options, const std::string& weights) {
    return absl::StrCat("{\"layer\":", layer, ",\"normalize\":{", options, "},\"weights\":", weights, "}");
  };
  const std::string good = R"("kind":"layer_norm","rounding":"after_gamma")";
  const std::string gamma = R"({"gamma":"layers.{i}.ln1.weight"})";
  const std::string name = R"("n.{i}")";
  struct Case {
    std::string description;
    std::vector<std::string> parts;
  };
  std::string many;
  for (int i = 0; i < 1001; ++i) many += (i == 0 ? "" : ",") + kNorm;
  const std::vector<Case> cases = {
      {"", {"not JSON"}},
      {"[]", {"list \"layers\""}},
      {"{}", {"list \"layers\""}},
      {R"({"layers":{}})", {"list \"layers\""}},
      {R"({"layers":[],"version":1})", {"nothing else"}},
      {R"({"layers":[],"layers":[]})", {"\"layers\"", "twice"}},
      {std::string("{\"layers\":[]}\0x", 15), {"not JSON"}},
      {Entries("[]"), {"layers[0]: expected an object"}},
      {Entries(kNorm + ",{}"), {"layers[1].layer"}},
      {Entries(R"({"layer":"n"})"), {"layers[0].weights"}},
      {Entries(R"({"layer":"n","weights":{}})"), {"layers[0].normalize", "either normalize or feed_forward"}},
      {Entries(R"({"layer":"n","weights":{},"normalise":{}})"), {"layers[0]", "\"normalise\""}},
      {Entries(norm(name, R"("kind":"norm")", gamma)), {"layers[0].normalize.kind", "rms_norm, layer_norm"}},
      {Entries(norm(name, R"("kind":"layer_norm","eps":1)", gamma)), {"layers[0].normalize.eps", "no such option"}},
      {Entries(norm(name, R"("kind":"rms_norm")", gamma)), {"layers[0]", "rounding"}},
      {Entries(norm(name, good + R"(,"epsilon":-1)", gamma)), {"layers[0]", "epsilon", "-1"}},
      {Entries(norm(name, good + R"(,"group_size":3)", gamma)), {"layers[0]", "group_size", "3"}},
      {Entries(norm("7", good, gamma)), {"layers[0].layer: expected a name, got 7"}},
      {Entries(norm("\"\"", good, gamma)), {"layers[0].layer: expected a name"}},
      {Entries(norm("\"n\"", good, gamma)), {"layers[0].weights.gamma: expected no {i}"}},
      {Entries(norm(name, good, R"({"gamma":"layers.0.ln1.weight"})")), {"layers[0].weights.gamma: expected {i}"}},
      {Entries(norm("\"{i}.{i}\"", good, gamma)), {"layers[0].layer: expected {i} once"}},
      {Entries(norm(name, good, "[]")), {"layers[0].weights: expected an object"}},
      {Entries(norm(name, good, "{}")), {"layers[0].weights.gamma: expected the name of a tensor"}},
      {Entries(norm(name, good, R"({"gamma":null})")), {"layers[0].weights.gamma: expected a name, got null"}},
      {Entries(norm(name, good, R"({"gamma":"layers.{i}.ln1.weight","delta":"x{i}"})")),
       {"layers[0].weights.delta", "gamma, beta"}},
      {Entries(norm(name, good, R"({"gamma":"layer.{i}.ln1.weight"})")),
       {"layers[0].weights.gamma", "\"layer.{i}.ln1.weight\"", "that exists"}},
      {Entries(norm("\"n\"", good, R"({"gamma":"layers.2.ln1.weight"})")), {"\"layers.2.ln1.weight\"", "that exists"}},
      {Entries(norm("\"../{i}\"", good, gamma)), {"layers[0].layer", "\"../0\""}},
      {Entries(norm("\"a/{i}\"", good, gamma)), {"layers[0].layer", "\"a/0\""}},
      {Entries(kNorm + "," + kNorm), {"layers[1].layer: another entry describes \"layers.0.ln1\" too"}},
      {Entries(many), {"at most 1000 entries"}},
      {std::string((1 << 20) + 1, ' '), {"too long", "1048576"}},
  };
  for (const Case& one : cases) {
    const Model model(Kwt("0") + Kwt("1"));
    model.folder().Write("layerd.json", one.description);
    const absl::Status status = model.Open().status();
    ExpectError(status, kInvalid, "CHECKPOINT_DESCRIPTION", {"layerd.json"});
    for (const std::string& part : one.parts) {
      EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part)) << one.description.substr(0, 300);
    }
  }
}

TEST(CheckpointDescription, AFileAloneMayBePartOfWhatIsDescribed) {
  const Model model(Kwt("0"), "", Entries(kNorm + "," + kFfn));
  WriteTensors(model.folder().File("part.safetensors"), {{"layers.5.ln1.weight", {4}}, {"layers.5.ln1.bias", {4}}});
  const auto checkpoint = Checkpoint::Open(model.folder().File("part.safetensors"), "m");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(checkpoint->layers(), SizeIs(1));
  EXPECT_TRUE(StatusOf(checkpoint, "layers.5.ln1").ok());
}

}  // namespace
}  // namespace layerd
