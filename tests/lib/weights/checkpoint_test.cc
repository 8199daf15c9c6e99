#include "lib/weights/checkpoint.h"

#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "tests/lib/weights/test_files.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

Tensor Zeros(Shape shape) {
  const int64_t n = *NumElements(shape);
  return Tensor::FromFloats(DType::kFloat32, std::move(shape), std::vector<float>(n, 0.0f));
}

// A folder with a model of tensors of these shapes, all zero, and perhaps a config.json.
class Model {
 public:
  explicit Model(const std::map<std::string, Shape>& shapes, const std::string& config = "") {
    std::map<std::string, Tensor> tensors;
    for (const auto& [name, shape] : shapes) tensors.emplace(name, Zeros(shape));
    const absl::Status written = WriteSafetensors(folder_.File("model.safetensors"), tensors);
    EXPECT_TRUE(written.ok()) << written;
    if (!config.empty()) folder_.Write("config.json", config);
  }

  absl::StatusOr<CheckpointFeedForward> FeedForward(const std::string& prefix) const {
    return ReadFeedForward(*SafetensorsFile::Open(folder_.File("model.safetensors")), prefix);
  }
  absl::StatusOr<CheckpointNorm> Norm(const std::string& prefix) const {
    return ReadNorm(*SafetensorsFile::Open(folder_.File("model.safetensors")), prefix);
  }

 private:
  TemporaryFolder folder_;
};

const std::map<std::string, Shape> kLlama = {
    {"m.gate_proj.weight", {6, 4}}, {"m.up_proj.weight", {6, 4}}, {"m.down_proj.weight", {4, 6}}};

struct Names {
  const char* name;
  std::map<std::string, Shape> shapes;  // d 4, h 6
  std::string prefix;
  FeedForwardForm form;
  GateUpPacking packing;
  WeightLayout layout;
  bool biases;
};

void PrintTo(const Names& names, std::ostream* out) { *out << names.name; }

class CheckpointNames : public ::testing::TestWithParam<Names> {};

TEST_P(CheckpointNames, DecideFormPackingAndLayout) {
  const Names& names = GetParam();
  const Model model(names.shapes);
  for (const std::string& prefix : {names.prefix, names.prefix.empty() ? names.prefix : names.prefix + "."}) {
    const auto layer = model.FeedForward(prefix);
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_EQ(layer->spec.form, names.form);
    EXPECT_EQ(layer->spec.packing, names.packing);
    EXPECT_EQ(layer->spec.layout, names.layout);
    EXPECT_FALSE(layer->activation_known);
    EXPECT_THAT(layer->description, HasSubstr("activation not told; d 4, h 6"));
    const FeedForwardWeights& weights = layer->weights;
    const bool gated = names.form == FeedForwardForm::kGated;
    const bool packed = names.packing == GateUpPacking::kHalves;
    EXPECT_EQ(weights.gate.has_value(), gated && !packed);
    EXPECT_EQ(weights.up.has_value(), !packed);
    EXPECT_EQ(weights.gate_up.has_value(), packed);
    EXPECT_TRUE(weights.down.has_value());
    EXPECT_EQ(weights.gate_bias.has_value(), names.biases && gated && !packed);
    EXPECT_EQ(weights.up_bias.has_value(), names.biases && !packed);
    EXPECT_EQ(weights.gate_up_bias.has_value(), names.biases && packed);
    EXPECT_EQ(weights.down_bias.has_value(), names.biases);
    EXPECT_FALSE(weights.inner_norm_gamma.has_value());
  }
}

constexpr auto kGated = FeedForwardForm::kGated;
constexpr auto kPlain = FeedForwardForm::kPlain;
constexpr auto kSeparate = GateUpPacking::kSeparate;
constexpr auto kOutIn = WeightLayout::kOutIn;

INSTANTIATE_TEST_SUITE_P(
    All, CheckpointNames,
    ::testing::Values(
        Names{"Llama", kLlama, "m", kGated, kSeparate, kOutIn, false},
        Names{"LlamaWithBiases",
              {{"m.gate_proj.weight", {6, 4}},
               {"m.up_proj.weight", {6, 4}},
               {"m.down_proj.weight", {4, 6}},
               {"m.gate_proj.bias", {6}},
               {"m.up_proj.bias", {6}},
               {"m.down_proj.bias", {4}}},
              "m",
              kGated,
              kSeparate,
              kOutIn,
              true},
        Names{
            "Mixtral",
            {{"e.0.w1.weight", {6, 4}}, {"e.0.w3.weight", {6, 4}}, {"e.0.w2.weight", {4, 6}}, {"gate.weight", {2, 4}}},
            "e.0",
            kGated,
            kSeparate,
            kOutIn,
            false},
        Names{"Phi3",
              {{"m.gate_up_proj.weight", {12, 4}}, {"m.down_proj.weight", {4, 6}}},
              "m",
              kGated,
              GateUpPacking::kHalves,
              kOutIn,
              false},
        Names{"PackedWithBiases",
              {{"m.gate_up_proj.weight", {12, 4}},
               {"m.gate_up_proj.bias", {12}},
               {"m.down_proj.weight", {4, 6}},
               {"m.down_proj.bias", {4}}},
              "m",
              kGated,
              GateUpPacking::kHalves,
              kOutIn,
              true},
        Names{"Gpt2",
              {{"h.0.mlp.c_fc.weight", {4, 6}},
               {"h.0.mlp.c_fc.bias", {6}},
               {"h.0.mlp.c_proj.weight", {6, 4}},
               {"h.0.mlp.c_proj.bias", {4}},
               {"h.0.attn.c_proj.weight", {4, 4}}},
              "h.0.mlp",
              kPlain,
              kSeparate,
              WeightLayout::kInOut,
              true},
        Names{"GptNeoX",
              {{"m.dense_h_to_4h.weight", {6, 4}}, {"m.dense_4h_to_h.weight", {4, 6}}},
              "m",
              kPlain,
              kSeparate,
              kOutIn,
              false},
        Names{"Opt",
              {{"l.0.fc1.weight", {6, 4}}, {"l.0.fc1.bias", {6}}, {"l.0.fc2.weight", {4, 6}}, {"l.0.fc2.bias", {4}}},
              "l.0",
              kPlain,
              kSeparate,
              kOutIn,
              true},
        Names{"WithoutAPrefix", {{"fc1.weight", {6, 4}}, {"fc2.weight", {4, 6}}}, "", kPlain, kSeparate, kOutIn, false},
        Names{"Bert",
              {{"b.intermediate.dense.weight", {6, 4}},
               {"b.intermediate.dense.bias", {6}},
               {"b.output.dense.weight", {4, 6}},
               {"b.output.dense.bias", {4}},
               {"b.attention.output.dense.weight", {4, 4}}},
              "b",
              kPlain,
              kSeparate,
              kOutIn,
              true}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(ReadFeedForward, ActivationComesFromConfig) {
  const std::vector<std::pair<std::string, Activation>> cases = {
      {"\"hidden_act\":\"silu\"", Activation::kSilu},
      {"\"hidden_act\":\"swish\"", Activation::kSilu},
      {"\"hidden_act\":\"gelu\"", Activation::kGelu},
      {"\"hidden_act\":\"gelu_new\"", Activation::kGeluTanh},
      {"\"hidden_act\":\"gelu_pytorch_tanh\"", Activation::kGeluTanh},
      {"\"hidden_act\":\"gelu_fast\"", Activation::kGeluTanh},
      {"\"hidden_act\":\"relu\"", Activation::kRelu},
      {"\"hidden_act\":\"relu2\"", Activation::kReluSquared},
      {"\"hidden_act\":\"quick_gelu\"", Activation::kQuickGelu},
      {"\"hidden_act\":\"sigmoid\"", Activation::kSigmoid},
      {"\"hidden_activation\":\"gelu_pytorch_tanh\",\"hidden_act\":\"gelu\"", Activation::kGeluTanh},
      {"\"hidden_activation\":null,\"hidden_act\":\"relu\"", Activation::kRelu},
      {"\"model_type\":\"gemma\",\"hidden_act\":\"gelu\"", Activation::kGeluTanh},
      {"\"model_type\":\"gpt2\",\"activation_function\":\"gelu_new\"", Activation::kGeluTanh},
      {"\"vision\":{\"hidden_act\":\"gelu\",\"x\":[[\"hidden_act\",{\"hidden_act\":1}]]},\"hidden_act\":\"relu\"",
       Activation::kRelu},
  };
  for (const auto& [config, expected] : cases) {
    const auto layer = Model(kLlama, "{" + config + "}").FeedForward("m");
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_TRUE(layer->activation_known) << config;
    EXPECT_EQ(layer->spec.activation.kind, expected) << config;
    EXPECT_EQ(layer->spec.activation.beta, 1.0);
  }
}

TEST(ReadFeedForward, ActivationStaysOpenWithoutOne) {
  for (const char* config : {"{}", "{\"hidden_act\":null}", "{\"text_config\":{\"hidden_act\":\"silu\"}}"}) {
    const auto layer = Model(kLlama, config).FeedForward("m");
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_FALSE(layer->activation_known) << config;
  }
}

TEST(ReadFeedForward, UnknownActivationIsNamed) {
  ExpectError(Model(kLlama, "{\"hidden_act\":\"mish\"}").FeedForward("m").status(), kInvalid, "CHECKPOINT_ACTIVATION",
              {"config.json", "hidden_act", "\"mish\"", "silu, swish, gelu"});
}

TEST(ReadFeedForward, DamagedConfigIsNamed) {
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":[";
  for (const std::string& config :
       {std::string("{"), std::string("[]"), std::string("1"), std::string("{}\0x", 4), std::string("{}{}"), deep}) {
    ExpectError(Model(kLlama, config).FeedForward("m").status(), kInvalid, "CHECKPOINT_CONFIG", {"config.json"});
  }
  ExpectError(Model(kLlama, std::string((4 << 20) + 1, ' ')).FeedForward("m").status(), kInvalid, "CHECKPOINT_CONFIG",
              {"too long"});
}

TEST(ReadFeedForward, InnerNormOfBitNet) {
  std::map<std::string, Shape> shapes = kLlama;
  shapes["m.ffn_sub_norm.weight"] = {6};
  const auto layer = Model(shapes, "{\"hidden_act\":\"relu2\",\"rms_norm_eps\":1e-5}").FeedForward("m");
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_TRUE(layer->spec.inner_norm.has_value());
  EXPECT_EQ(layer->spec.inner_norm->epsilon, 1e-5);
  EXPECT_THAT(layer->weights.inner_norm_gamma->shape(), ElementsAre(6));
}

TEST(ReadFeedForward, NoSuchPrefixNamesSomeThatExist) {
  std::map<std::string, Shape> shapes;
  for (int i = 0; i < 7; ++i) {
    for (const auto& [name, shape] : kLlama) shapes[absl::StrCat("layers.", i, ".", name)] = shape;
  }
  shapes["layers.0.attn.c_proj.weight"] = {4, 4};
  const Model model(shapes);
  const absl::Status status = model.FeedForward("layers.9.m").status();
  ExpectError(status, absl::StatusCode::kNotFound, "NO_SUCH_LAYER",
              {"model.safetensors", "\"layers.9.m\"", "\"layers.0.m\", \"layers.1.m\"", "and 3 more"});
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("attn")));
  EXPECT_EQ(DetailsOf(status).resource_type, "layer");
  ExpectError(model.FeedForward(std::string(20000, 'x')).status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER", {"…"});
  ExpectError(model.FeedForward("layers.0").status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER", {});
  ExpectError(model.FeedForward("").status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER", {});
  ExpectError(Model({}).FeedForward("m").status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER", {"none"});
}

TEST(ReadFeedForward, IncompleteLayerNamesWhatIsMissing) {
  for (const auto& [missing, shape] : kLlama) {
    std::map<std::string, Shape> shapes = kLlama;
    shapes.erase(missing);
    ExpectError(Model(shapes).FeedForward("m").status(), kInvalid, "CHECKPOINT_INCOMPLETE",
                {"\"m\" is incomplete", absl::StrCat("no \"", missing, "\"")});
  }
  ExpectError(Model({{"m.gate_up_proj.weight", {12, 4}}}).FeedForward("m").status(), kInvalid, "CHECKPOINT_INCOMPLETE",
              {"no \"m.down_proj.weight\""});
}

TEST(ReadFeedForward, TwoFormsAtOnceAreAmbiguous) {
  std::map<std::string, Shape> shapes = kLlama;
  shapes["m.gate_up_proj.weight"] = {12, 4};
  ExpectError(Model(shapes).FeedForward("m").status(), kInvalid, "CHECKPOINT_AMBIGUOUS", {"gate_proj", "gate_up_proj"});
}

TEST(ReadFeedForward, ShapesThatDoNotFitAreNamed) {
  const std::vector<std::pair<std::string, Shape>> wrong = {
      {"m.gate_proj.weight", {5, 4}}, {"m.gate_proj.weight", {6, 3}}, {"m.gate_proj.weight", {24}},
      {"m.down_proj.weight", {4, 5}}, {"m.gate_proj.bias", {4}},      {"m.up_proj.bias", {6, 1}},
      {"m.down_proj.bias", {6}},      {"m.ffn_sub_norm.weight", {4}},
  };
  for (const auto& [name, shape] : wrong) {
    std::map<std::string, Shape> shapes = kLlama;
    shapes[name] = shape;
    ExpectError(Model(shapes).FeedForward("m").status(), kInvalid, "CHECKPOINT_SHAPE",
                {absl::StrCat("tensor \"", name, "\""), absl::StrCat("got ", ToString(shape))});
  }
  for (const char* name : {"m.up_proj.weight", "m.down_proj.weight"}) {
    std::map<std::string, Shape> shapes = kLlama;
    shapes[name] = {6, 4, 1};
    ExpectError(Model(shapes).FeedForward("m").status(), kInvalid, "CHECKPOINT_SHAPE", {name, "2 dimensions"});
  }
  ExpectError(Model({{"m.gate_up_proj.weight", {7, 4}}, {"m.down_proj.weight", {4, 3}}}).FeedForward("m").status(),
              kInvalid, "CHECKPOINT_SHAPE", {"even number", "7"});
  // Starcoder2 has GPT-2's names with the matrices [out, in]: its biases betray it.
  ExpectError(
      Model({{"m.c_fc.weight", {6, 4}}, {"m.c_fc.bias", {6}}, {"m.c_proj.weight", {4, 6}}, {"m.c_proj.bias", {4}}})
          .FeedForward("m")
          .status(),
      kInvalid, "CHECKPOINT_SHAPE", {"m.c_fc.bias"});
}

TEST(ReadFeedForward, QuantisedWeightsAreNamed) {
  const TemporaryFolder folder;
  const auto file = SafetensorsFile::Open(folder.Write(
      "q.safetensors", SafetensorsBytes("{\"fc1.weight\":{\"dtype\":\"I8\",\"shape\":[2,2],\"data_offsets\":[0,4]},"
                                        "\"fc2.weight\":{\"dtype\":\"I8\",\"shape\":[2,2],\"data_offsets\":[4,8]}}",
                                        8)));
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectError(ReadFeedForward(*file, "").status(), kInvalid, "SAFETENSORS_DTYPE",
              {"q.safetensors", "fc1.weight", "I8"});
}

TEST(ReadNorm, ReadsGammaAndBetaUnderBothSpellings) {
  const Model model({{"a.weight", {4}}, {"b.weight", {4}}, {"b.bias", {4}}, {"c.gamma", {4}}, {"c.beta", {4}}});
  for (const char* prefix : {"a", "a.", "b", "c"}) {
    const auto norm = model.Norm(prefix);
    ASSERT_TRUE(norm.ok()) << norm.status();
    EXPECT_THAT(norm->gamma.shape(), ElementsAre(4));
    const bool has_beta = prefix[0] != 'a';
    EXPECT_EQ(norm->beta.has_value(), has_beta);
    EXPECT_EQ(norm->kind, has_beta ? std::optional(NormKind::kLayerNorm) : std::nullopt);
    EXPECT_EQ(norm->epsilon, std::nullopt);
  }
}

TEST(ReadNorm, KindAndEpsilonComeFromConfig) {
  struct Case {
    std::string config;
    bool bias;
    std::optional<NormKind> kind;
    std::optional<double> epsilon;
  };
  const auto layer_norm = NormKind::kLayerNorm;
  const auto rms_norm = NormKind::kRmsNorm;
  const std::vector<Case> cases = {
      {"\"rms_norm_eps\":1e-05", false, rms_norm, 1e-5},
      {"\"rms_norm_eps\":0", false, rms_norm, 0.0},
      {"\"layer_norm_eps\":1e-12", true, layer_norm, 1e-12},
      {"\"layer_norm_eps\":1e-12", false, layer_norm, 1e-12},
      {"\"layer_norm_epsilon\":1e-5", true, layer_norm, 1e-5},
      {"\"norm_eps\":1e-5", true, layer_norm, 1e-5},
      {"\"norm_eps\":1e-5", false, std::nullopt, 1e-5},
      {"\"rms_norm_eps\":1e-5", true, layer_norm, std::nullopt},
      {"\"rms_norm_eps\":1e-5,\"layer_norm_eps\":1e-6", false, std::nullopt, std::nullopt},
      {"\"rms_norm_eps\":1e-5,\"layer_norm_eps\":1e-6", true, layer_norm, 1e-6},
      {"\"rms_norm_eps\":\"1e-5\"", false, std::nullopt, std::nullopt},
  };
  for (const Case& one : cases) {
    std::map<std::string, Shape> shapes = {{"n.weight", {4}}};
    if (one.bias) shapes["n.bias"] = {4};
    const auto norm = Model(shapes, "{" + one.config + "}").Norm("n");
    ASSERT_TRUE(norm.ok()) << norm.status();
    EXPECT_EQ(norm->kind, one.kind) << one.config << one.bias;
    EXPECT_EQ(norm->epsilon, one.epsilon) << one.config << one.bias;
  }
  ExpectError(Model({{"n.weight", {4}}}, "{\"rms_norm_eps\":-1}").Norm("n").status(), kInvalid, "CHECKPOINT_EPSILON",
              {"config.json", "rms_norm_eps", "-1"});
}

TEST(ReadNorm, WrongNormsAreNamed) {
  const Model model({{"m.linear.weight", {4, 4}},
                     {"m.odd.weight", {4}},
                     {"m.odd.bias", {3}},
                     {"m.half.bias", {4}},
                     {"m.both.weight", {4}},
                     {"m.both.gamma", {4}}});
  ExpectError(model.Norm("m.none").status(), absl::StatusCode::kNotFound, "NO_SUCH_LAYER",
              {"\"m.none\"", "\"m.both\", \"m.odd\""});
  ExpectError(model.Norm("m.linear").status(), kInvalid, "CHECKPOINT_SHAPE", {"m.linear.weight", "1 dimension"});
  ExpectError(model.Norm("m.odd").status(), kInvalid, "CHECKPOINT_SHAPE", {"m.odd.bias", "expected the shape [4]"});
  ExpectError(model.Norm("m.half").status(), kInvalid, "CHECKPOINT_INCOMPLETE", {"m.half.bias", "m.half.weight"});
  ExpectError(model.Norm("m.both").status(), kInvalid, "CHECKPOINT_AMBIGUOUS", {"weight", "gamma"});
}

TEST(CheckpointRealFile, Stories260k) {
  LAYERD_TEST_DATA_OR_SKIP(path, "stories260k/stories260k.bf16.safetensors");
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto layer = ReadFeedForward(*file, "model.layers.4.mlp");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->description, "gated: gate_proj, up_proj, down_proj [out, in]; silu; d 64, h 172");
  EXPECT_TRUE(layer->activation_known);
  EXPECT_EQ(layer->weights.gate->dtype(), DType::kBFloat16);
  EXPECT_THAT(layer->weights.down->shape(), ElementsAre(64, 172));
  for (const char* prefix : {"model.norm", "model.layers.0.input_layernorm"}) {
    const auto norm = ReadNorm(*file, prefix);
    ASSERT_TRUE(norm.ok()) << norm.status();
    EXPECT_EQ(norm->description, "RMSNorm; eps 1e-05; d 64");
    EXPECT_EQ(norm->epsilon, 1e-5);
  }
}

TEST(CheckpointRealFile, Stories260kExperts) {
  LAYERD_TEST_DATA_OR_SKIP(path, "stories260k/moe5_from_layers.f32.safetensors");
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto expert = ReadFeedForward(*file, "model.layers.0.block_sparse_moe.experts.3");
  ASSERT_TRUE(expert.ok()) << expert.status();
  EXPECT_THAT(expert->weights.up->shape(), ElementsAre(172, 64));
  ExpectError(ReadFeedForward(*file, "model.layers.0.block_sparse_moe").status(), absl::StatusCode::kNotFound,
              "NO_SUCH_LAYER", {"experts.0"});
}

TEST(CheckpointRealFile, Kwt1) {
  LAYERD_TEST_DATA_OR_SKIP(path, "kwt1/kwt1_ffn_norm.f32.safetensors");
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto layer = ReadFeedForward(*file, "layers.11");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->description, "plain: fc1, fc2 [out, in], biases; activation not told; d 64, h 256");
  EXPECT_THAT(layer->weights.up_bias->shape(), ElementsAre(256));
  const auto norm = ReadNorm(*file, "layers.11.ln2");
  ASSERT_TRUE(norm.ok()) << norm.status();
  EXPECT_EQ(norm->kind, NormKind::kLayerNorm);
  EXPECT_EQ(norm->epsilon, std::nullopt);
}

}  // namespace
}  // namespace layerd
