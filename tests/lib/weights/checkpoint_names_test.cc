// Layers that no family knows: by their tensors' names, by config.json, and by what the caller says.
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/lib/weights/checkpoint_files.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Names {
  const char* name;
  Shapes shapes;  // d 4, h 6
  std::string layer;
  std::string description;
};

void PrintTo(const Names& names, std::ostream* out) { *out << names.name; }

class CheckpointNames : public ::testing::TestWithParam<Names> {};

TEST_P(CheckpointNames, DecideFormPackingAndLayout) {
  const Names& names = GetParam();
  const Model model(names.shapes);
  ExpectUnusable(StatusOf(model.Open(), names.layer), "LAYER_OPTIONS_OPEN", {"the files leave open: activation;"});
  const auto checkpoint = model.Open({.activation = Activation::kSilu});
  EXPECT_EQ(checkpoint->family(), "tensor names");
  for (const std::string& name : {names.layer, names.layer + "."}) {
    const auto layer = checkpoint->Find(name);
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_EQ(Description((*layer)->info()), names.description);
    EXPECT_EQ((*layer)->info().name, "models/m/layers/" + names.layer);
    const auto read = (*layer)->Read();
    for (const auto& [role, tensor] : (*layer)->info().tensors) {
      EXPECT_TRUE(SameBits(WeightOf(read, role), TensorNamed(tensor, names.shapes.at(tensor)))) << tensor;
    }
  }
}

constexpr char kGated[] = "gated: gate, up, down [out, in]; silu; d 4, h 6; F32";
constexpr char kPlain[] = "plain: up, down [out, in]; silu; d 4, h 6; F32";
constexpr char kPlainBiased[] = "plain: up, down [out, in], biases; silu; d 4, h 6; F32";

INSTANTIATE_TEST_SUITE_P(
    All, CheckpointNames,
    ::testing::Values(
        Names{"Llama", GateUpDown("m"), "m", kGated},
        Names{"LlamaWithBiases",
              GateUpDown("m") + Shapes{{"m.gate_proj.bias", {6}}, {"m.up_proj.bias", {6}}, {"m.down_proj.bias", {4}}},
              "m", "gated: gate, up, down [out, in], biases; silu; d 4, h 6; F32"},
        Names{
            "Mixtral",
            {{"e.0.w1.weight", {6, 4}}, {"e.0.w3.weight", {6, 4}}, {"e.0.w2.weight", {4, 6}}, {"gate.weight", {2, 4}}},
            "e.0",
            kGated},
        Names{"Phi3",
              {{"m.gate_up_proj.weight", {12, 4}}, {"m.down_proj.weight", {4, 6}}},
              "m",
              "gated: gate_up in halves, down [out, in]; silu; d 4, h 6; F32"},
        Names{"PackedWithBiases",
              {{"m.gate_up_proj.weight", {12, 4}},
               {"m.gate_up_proj.bias", {12}},
               {"m.down_proj.weight", {4, 6}},
               {"m.down_proj.bias", {4}}},
              "m",
              "gated: gate_up in halves, down [out, in], biases; silu; d 4, h 6; F32"},
        Names{"Gpt2",
              {{"h.0.mlp.c_fc.weight", {4, 6}},
               {"h.0.mlp.c_fc.bias", {6}},
               {"h.0.mlp.c_proj.weight", {6, 4}},
               {"h.0.mlp.c_proj.bias", {4}},
               {"h.0.attn.c_proj.weight", {4, 4}}},
              "h.0.mlp",
              "plain: up, down [in, out], biases; silu; d 4, h 6; F32"},
        // GPT-2's names with nn.Linear's layout, as the biases prove.
        Names{"Starcoder2",
              {{"m.c_fc.weight", {6, 4}}, {"m.c_fc.bias", {6}}, {"m.c_proj.weight", {4, 6}}, {"m.c_proj.bias", {4}}},
              "m",
              kPlainBiased},
        Names{"GptNeoX", {{"m.dense_h_to_4h.weight", {6, 4}}, {"m.dense_4h_to_h.weight", {4, 6}}}, "m", kPlain},
        Names{"Opt",
              {{"l.0.fc1.weight", {6, 4}}, {"l.0.fc1.bias", {6}}, {"l.0.fc2.weight", {4, 6}}, {"l.0.fc2.bias", {4}}},
              "l.0",
              kPlainBiased},
        Names{"Bert",
              {{"b.intermediate.dense.weight", {6, 4}},
               {"b.intermediate.dense.bias", {6}},
               {"b.output.dense.weight", {4, 6}},
               {"b.output.dense.bias", {4}},
               {"b.attention.output.dense.weight", {4, 4}}},
              "b.ffn",
              kPlainBiased}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(CheckpointNames, LayoutIsNeverGuessedFromShapes) {
  // Without a bias, d and h could be either; where they are equal, a bias proves nothing.
  for (const Shapes& shapes : {Shapes{{"m.c_fc.weight", {4, 6}}, {"m.c_proj.weight", {6, 4}}},
                               Shapes{{"m.c_fc.weight", {4, 4}}, {"m.c_fc.bias", {4}}, {"m.c_proj.weight", {4, 4}}},
                               Shapes{{"m.c_fc.weight", {4, 6}}, {"m.c_fc.bias", {5}}, {"m.c_proj.weight", {6, 4}}}}) {
    ExpectUnusable(StatusOf(Model(shapes).Open({.activation = Activation::kGelu}), "m"), "LAYER_OPTIONS_OPEN",
                   {"leave open: layout;"});
  }
}

TEST(CheckpointNames, ActivationComesFromConfig) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("hidden_act":"silu")", "silu (config.json: hidden_act)"},
      {R"("hidden_act":"swish")", "silu (config.json: hidden_act)"},
      {R"("hidden_act":"gelu")", "gelu (config.json: hidden_act)"},
      {R"("hidden_act":"gelu_python")", "gelu (config.json: hidden_act)"},
      {R"("hidden_act":"gelu_new")", "gelu_tanh (config.json: hidden_act)"},
      {R"("hidden_act":"gelu_pytorch_tanh")", "gelu_tanh (config.json: hidden_act)"},
      {R"("hidden_act":"gelu_fast")", "gelu_tanh (config.json: hidden_act)"},
      {R"("hidden_act":"relu")", "relu (config.json: hidden_act)"},
      {R"("hidden_act":"relu2")", "relu_squared (config.json: hidden_act)"},
      {R"("hidden_act":"quick_gelu")", "quick_gelu (config.json: hidden_act)"},
      {R"("hidden_act":"sigmoid")", "sigmoid (config.json: hidden_act)"},
      {R"("hidden_act":"linear")", "identity (config.json: hidden_act)"},
      {R"("hidden_activation":"gelu_pytorch_tanh","hidden_act":"gelu")", "gelu_tanh (config.json: hidden_activation)"},
      {R"("hidden_activation":null,"hidden_act":"relu")", "relu (config.json: hidden_act)"},
      {R"("activation_function":"gelu_new")", "gelu_tanh (config.json: activation_function)"},
      {R"("x":{"hidden_act":"gelu","x":[["hidden_act",{"hidden_act":1}]]},"hidden_act":"relu")",
       "relu (config.json: hidden_act)"},
      {R"("quantization_config":{},"hidden_act":"relu")", "relu (config.json: hidden_act)"},
  };
  for (const auto& [config, expected] : cases) {
    const auto checkpoint = Model(GateUpDown("m"), "{" + config + "}").Open();
    EXPECT_TRUE(StatusOf(checkpoint, "m").ok()) << config;
    EXPECT_THAT(InferredOf(checkpoint, "m"),
                ElementsAre("form: gated (tensor names)", "packing: separate (tensor names)",
                            "layout: out_in (tensor names)", "activation: " + expected));
  }
  for (const char* config : {"{}", R"({"hidden_act":null})", R"({"model_type":"x"})", R"({"model_type":7})"}) {
    ExpectUnusable(StatusOf(Model(GateUpDown("m"), config).Open(), "m"), "LAYER_OPTIONS_OPEN", {"activation"});
  }
}

TEST(CheckpointNames, InnerNormOfBitNet) {
  const Shapes shapes = GateUpDown("m") + Shapes{{"m.ffn_sub_norm.weight", {6}}};
  const auto checkpoint = Model(shapes, R"({"hidden_act":"relu2","rms_norm_eps":1e-5})").Open();
  EXPECT_EQ(Described(checkpoint)["m"], "gated: gate, up, down [out, in], inner norm; relu_squared; d 4, h 6; F32");
  EXPECT_EQ(InferredOf(checkpoint, "m").back(), "inner_norm.epsilon: 1e-05 (config.json: rms_norm_eps)");
  const auto layer = (*checkpoint->Find("m"))->Read();
  EXPECT_EQ(std::get<FeedForwardLayer>(*layer).spec.inner_norm->epsilon, 1e-5);
  EXPECT_THAT(WeightOf(layer, "inner_norm_gamma").shape(), ElementsAre(6));
  ExpectUnusable(StatusOf(Model(shapes, R"({"hidden_act":"relu2"})").Open(), "m"), "LAYER_OPTIONS_OPEN",
                 {"leave open: inner_norm.epsilon;"});
}

TEST(CheckpointNames, NoSuchLayerNamesSomeThatExist) {
  Shapes shapes = {{"layers.0.attn.c_proj.weight", {4, 4}}};
  for (int i = 0; i < 7; ++i) shapes = shapes + GateUpDown(absl::StrCat("layers.", i, ".m"));
  const auto checkpoint = Model(shapes).Open();
  const absl::Status status = checkpoint->Find("layers.9.m").status();
  ExpectError(status, absl::StatusCode::kNotFound, "NO_SUCH_LAYER",
              {"\"layers.9.m\"", "\"layers.0.m\", \"layers.1.m\"", "and 3 more"});
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("attn")));
  EXPECT_EQ(DetailsOf(status).resource_type, "layer");
  ExpectError(checkpoint->Find(std::string(20000, 'x')).status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER", {"…"});
  for (const char* name : {"layers.0", "", ".", "models/m/layers/layers.0.m"}) {
    ExpectError(checkpoint->Find(name).status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER", {});
  }
  ExpectError(Model({}).Open()->Find("m").status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER", {"none"});
}

TEST(CheckpointNames, IncompleteLayersNameWhatIsMissing) {
  const Shapes llama = GateUpDown("m");
  for (const auto& [missing, shape] : llama) {
    Shapes shapes = llama;
    shapes.erase(missing);
    ExpectUnusable(StatusOf(Model(shapes).Open(), "m"), "LAYER_INCOMPLETE", {absl::StrCat("no \"", missing, "\"")});
  }
  ExpectUnusable(StatusOf(Model({{"m.gate_up_proj.weight", {12, 4}}}).Open(), "m"), "LAYER_INCOMPLETE",
                 {"no \"m.down_proj.weight\""});
}

TEST(CheckpointNames, TwoFormsAtOnceAreAmbiguous) {
  const Shapes shapes = GateUpDown("m") + Shapes{{"m.fc1.weight", {6, 4}}, {"m.fc2.weight", {4, 6}}};
  ExpectUnusable(StatusOf(Model(shapes).Open({.activation = Activation::kSilu}), "m"), "LAYER_AMBIGUOUS",
                 {"m.down_proj.weight", "m.fc2.weight"});
  // Half of another form is no other form.
  EXPECT_TRUE(
      StatusOf(Model(GateUpDown("m") + Shapes{{"m.fc1.weight", {6, 4}}}).Open({.activation = Activation::kSilu}), "m")
          .ok());
}

TEST(CheckpointNames, ShapesThatDoNotFitAreNamed) {
  const std::vector<std::pair<std::string, Shape>> wrong = {
      {"m.up_proj.weight", {5, 4}},      {"m.up_proj.weight", {6, 3}},   {"m.up_proj.weight", {24}},
      {"m.gate_proj.weight", {6, 4, 1}}, {"m.down_proj.weight", {4, 5}}, {"m.down_proj.weight", {4, 6, 1}},
      {"m.gate_proj.bias", {4}},         {"m.up_proj.bias", {6, 1}},     {"m.down_proj.bias", {6}},
      {"m.ffn_sub_norm.weight", {4}},
  };
  for (const auto& [name, shape] : wrong) {
    Shapes shapes = GateUpDown("m");
    shapes[name] = shape;
    const auto checkpoint = Model(shapes, R"({"hidden_act":"silu","norm_eps":1})").Open();
    ExpectUnusable(StatusOf(checkpoint, "m"), "LAYER_DAMAGED",
                   {absl::StrCat("tensor \"", name, "\""), absl::StrCat("got ", ToString(shape))});
  }
  ExpectUnusable(StatusOf(Model({{"m.gate_up_proj.weight", {7, 4}}, {"m.down_proj.weight", {4, 3}}})
                              .Open({.activation = Activation::kSilu}),
                          "m"),
                 "LAYER_DAMAGED", {"m.gate_up_proj.weight", "7"});
  ExpectUnusable(StatusOf(Model({{"n.weight", {4}}, {"n.bias", {3}}}, R"({"norm_eps":1})").Open(), "n"),
                 "LAYER_DAMAGED", {"tensor \"n.bias\"", "got [3]"});
  ExpectUnusable(StatusOf(Model({{"n.weight", {0}}, {"n.bias", {0}}}, R"({"norm_eps":1})").Open(), "n"),
                 "LAYER_DAMAGED", {"tensor \"n.weight\"", "got [0]"});
}

TEST(CheckpointNames, NormsUnderBothSpellings) {
  const Model model({{"a.weight", {4}}, {"b.weight", {4}}, {"b.bias", {4}}, {"c.gamma", {4}}, {"c.beta", {4}}},
                    R"({"norm_eps":0.25})");
  const auto checkpoint = model.Open();
  auto described = Described(checkpoint);
  EXPECT_EQ(described["b"], "layer_norm, bias; eps 0.25; after_gamma; d 4; F32");
  EXPECT_EQ(described["c"], described["b"]);
  ExpectUnusable(StatusOf(checkpoint, "a"), "LAYER_OPTIONS_OPEN", {"leave open: kind, rounding;"});
  EXPECT_EQ(Described(model.Open({.norm_kind = NormKind::kRmsNorm, .norm_rounding = NormRounding::kBeforeGamma}))["a"],
            "rms_norm; eps 0.25; before_gamma; d 4; F32");
}

TEST(CheckpointNames, KindAndEpsilonComeFromConfig) {
  struct Case {
    std::string config;
    bool bias;
    std::string expected;  // a description, or what stays open
  };
  const std::string rms = "rms_norm; eps ", layer = "layer_norm; eps ", biased = "layer_norm, bias; eps ";
  const std::vector<Case> cases = {
      {R"("rms_norm_eps":1e-05)", false, rms + "1e-05"},
      {R"("rms_norm_eps":0)", false, rms + "0.0"},
      {R"("layer_norm_eps":1e-12)", true, biased + "1e-12"},
      {R"("layer_norm_eps":1e-12)", false, layer + "1e-12"},
      {R"("layer_norm_epsilon":1e-5)", true, biased + "1e-05"},
      {R"("norm_eps":1e-5)", true, biased + "1e-05"},
      {R"("norm_eps":1e-5)", false, "leave open: kind;"},
      {R"("rms_norm_eps":1e-5)", true, "leave open: epsilon;"},
      {R"("rms_norm_eps":1e-5,"layer_norm_eps":1e-6)", false, "leave open: kind, epsilon;"},
      {R"("rms_norm_eps":1e-5,"layer_norm_eps":1e-6)", true, biased + "1e-06"},
      {R"("rms_norm_eps":"1e-5")", false, "leave open: epsilon (config.json: rms_norm_eps: expected a number"},
      {R"("rms_norm_eps":-1)", false, "got -1"},
      {R"("other":1)", true, "leave open: epsilon;"},
  };
  for (const Case& one : cases) {
    Shapes shapes = {{"n.weight", {4}}};
    if (one.bias) shapes["n.bias"] = {4};
    // The one kind of norm whose rounding nothing tells gets it from the caller.
    const auto checkpoint = Model(shapes, "{" + one.config + "}").Open({.norm_rounding = NormRounding::kAfterGamma});
    EXPECT_THAT(Described(checkpoint)["n"], HasSubstr(one.expected)) << one.config << one.bias;
  }
  const auto open = Model({{"n.weight", {4}}}, R"({"rms_norm_eps":1})").Open();
  ExpectUnusable(StatusOf(open, "n"), "LAYER_OPTIONS_OPEN", {"leave open: rounding;"});
}

TEST(CheckpointNames, WhatIsNoLayerIsNotListed) {
  const Model model({{"m.linear.weight", {4, 4}},
                     {"m.linear.bias", {4}},
                     {"m.conv.weight", {4, 4, 3}},
                     {"m.half.bias", {4}},
                     {"weight", {4}},
                     {".weight", {4}},
                     {"fc1.weight", {6, 4}},
                     {"fc2.weight", {4, 6}},
                     {"m.attn.c_proj.weight", {4, 4}},
                     {"m.output.dense.weight", {4, 4}},
                     // No layer can be called so.
                     {"../n.weight", {4}},
                     {"a/b.weight", {4}},
                     {".hidden.weight", {4}},
                     {std::string(129, 'n') + ".weight", {4}},
                     {std::string("z\0n.weight", 10), {4}}});
  EXPECT_TRUE(Described(model.Open()).empty());
}

}  // namespace
}  // namespace layerd
