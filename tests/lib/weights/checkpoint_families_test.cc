// Every known family by a small checkpoint with its names.
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lib/weights/families.h"
#include "tests/lib/weights/checkpoint_files.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

using Descriptions = std::map<std::string, std::string>;

// Modules of a norm, d 4 where nothing else is said.
Shapes Gammas(const std::vector<std::string>& paths, int64_t dim = 4) {
  Shapes shapes;
  for (const std::string& path : paths) shapes[path + ".weight"] = {dim};
  return shapes;
}
Shapes GammasAndBetas(const std::vector<std::string>& paths) {
  Shapes shapes = Gammas(paths);
  for (const std::string& path : paths) shapes[path + ".bias"] = {4};
  return shapes;
}
Shapes Matrix(const std::string& path, Shape shape) { return {{path + ".weight", std::move(shape)}}; }
Shapes Biased(const std::string& path, Shape shape, int64_t out) {
  return {{path + ".weight", std::move(shape)}, {path + ".bias", {out}}};
}

constexpr char kSwiGlu[] = "gated: gate, up, down [out, in]; silu; d 4, h 6; F32";
constexpr char kGeGlu[] = "gated: gate, up, down [out, in]; gelu_tanh; d 4, h 6; F32";
constexpr char kPackedSwiGlu[] = "gated: gate_up in halves, down [out, in]; silu; d 4, h 6; F32";

std::string Rms(const std::string& eps, const std::string& dim = "4") {
  return "rms_norm; eps " + eps + "; before_gamma; d " + dim + "; F32";
}
std::string RoundedOnce(const std::string& eps, const std::string& dim = "4") {
  return "rms_norm; eps " + eps + "; after_gamma; d " + dim + "; F32";
}
std::string Gemma(const std::string& dim = "4") {
  return "rms_norm; eps 1e-06; after_gamma; gamma + 1; d " + dim + "; F32";
}
std::string WithBeta(const std::string& eps) { return "layer_norm, bias; eps " + eps + "; after_gamma; d 4; F32"; }

// All of `paths` described by `text`.
Descriptions All(const std::vector<std::string>& paths, const std::string& text) {
  Descriptions all;
  for (const std::string& path : paths) all[path] = text;
  return all;
}

const std::vector<std::string> kPreNorms = {"model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm",
                                            "model.norm"};
const std::vector<std::string> kHeadNorms = {"model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm"};
const std::vector<std::string> kAfterParts = {"model.layers.0.post_attention_layernorm",
                                              "model.layers.0.post_feedforward_layernorm", "model.norm"};
const std::vector<std::string> kSandwich = {"model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm",
                                            "model.layers.0.pre_feedforward_layernorm",
                                            "model.layers.0.post_feedforward_layernorm", "model.norm"};
const std::string kMlp = "model.layers.0.mlp";

struct Case {
  std::string model_type;
  Shapes tensors;
  Descriptions layers;  // exactly
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.model_type; }

std::vector<Case> Cases() {
  const Shapes llama = Gammas(kPreNorms) + GateUpDown(kMlp) + Matrix("model.layers.0.self_attn.q_proj", {4, 4}) +
                       Matrix("model.embed_tokens", {9, 4}) + Matrix("lm_head", {9, 4});
  const auto llama_layers = [](const std::string& eps) { return All(kPreNorms, Rms(eps)) + All({kMlp}, kSwiGlu); };
  const std::string expert = "model.layers.1.mlp.experts.12";
  std::vector<Case> cases = {{"llama", llama, llama_layers("1e-06")},
                             {"mistral", llama, llama_layers("1e-06")},
                             {"qwen2", llama, llama_layers("1e-06")}};
  for (const char* qwen : {"qwen2_moe", "qwen3_moe"}) {
    cases.push_back({qwen,
                     llama + GateUpDown(expert) + GateUpDown("model.layers.1.mlp.shared_expert") +
                         Matrix("model.layers.1.mlp.gate", {2, 4}) +
                         Matrix("model.layers.1.mlp.shared_expert_gate", {1, 4}),
                     llama_layers("1e-06") + All({expert, "model.layers.1.mlp.shared_expert"}, kSwiGlu)});
  }
  for (const char* deepseek : {"deepseek_v2", "deepseek_v3"}) {
    const std::vector<std::string> latent = {"model.layers.0.self_attn.q_a_layernorm",
                                             "model.layers.0.self_attn.kv_a_layernorm"};
    cases.push_back({deepseek,
                     llama + GateUpDown(expert) + GateUpDown("model.layers.1.mlp.shared_experts") + Gammas(latent, 2) +
                         Shapes{{"model.layers.1.mlp.gate.e_score_correction_bias", {2}}} +
                         Matrix("model.layers.1.mlp.gate", {2, 4}),
                     llama_layers("1e-06") + All({expert, "model.layers.1.mlp.shared_experts"}, kSwiGlu) +
                         All(latent, Rms("1e-06", "2"))});
  }
  const std::string mixtral = "model.layers.0.block_sparse_moe";
  cases.push_back({"mixtral",
                   Gammas(kPreNorms) + Matrix(mixtral + ".gate", {2, 4}) + Matrix(mixtral + ".experts.1.w1", {6, 4}) +
                       Matrix(mixtral + ".experts.1.w3", {6, 4}) + Matrix(mixtral + ".experts.1.w2", {4, 6}),
                   All(kPreNorms, Rms("1e-05")) + All({mixtral + ".experts.1"}, kSwiGlu)});
  cases.push_back({"qwen3", llama + Gammas(kHeadNorms, 2), llama_layers("1e-06") + All(kHeadNorms, Rms("1e-06", "2"))});
  cases.push_back({"gemma", llama, All(kPreNorms, Gemma()) + All({kMlp}, kGeGlu)});
  const Shapes gemma2 = Gammas(kSandwich) + GateUpDown(kMlp);
  cases.push_back({"gemma2", gemma2, All(kSandwich, Gemma()) + All({kMlp}, kGeGlu)});
  for (const char* gemma3 : {"gemma3", "gemma3_text"}) {
    cases.push_back({gemma3, gemma2 + Gammas(kHeadNorms, 2),
                     All(kSandwich, Gemma()) + All(kHeadNorms, Gemma("2")) + All({kMlp}, kGeGlu)});
  }
  const Shapes packed = Matrix(kMlp + ".gate_up_proj", {12, 4}) + Matrix(kMlp + ".down_proj", {4, 6});
  cases.push_back({"phi3", Gammas(kPreNorms) + packed, All(kPreNorms, Rms("1e-05")) + All({kMlp}, kPackedSwiGlu)});
  cases.push_back({"glm", Gammas(kPreNorms) + packed, All(kPreNorms, Rms("1.5625e-07")) + All({kMlp}, kPackedSwiGlu)});
  std::vector<std::string> glm4 = kPreNorms;
  glm4.insert(glm4.end(), {"model.layers.0.post_self_attn_layernorm", "model.layers.0.post_mlp_layernorm"});
  cases.push_back({"glm4", Gammas(glm4) + packed, All(glm4, Rms("1.5625e-07")) + All({kMlp}, kPackedSwiGlu)});
  cases.push_back(
      {"olmo2", Gammas(kAfterParts) + Gammas(kHeadNorms, 8) + GateUpDown(kMlp),
       All(kAfterParts, RoundedOnce("1e-05")) + All(kHeadNorms, RoundedOnce("1e-05", "8")) + All({kMlp}, kSwiGlu)});
  cases.push_back({"olmo", GateUpDown(kMlp), All({kMlp}, kSwiGlu)});
  cases.push_back({"gpt_oss",
                   Gammas(kPreNorms) + Biased("model.layers.0.mlp.router", {2, 4}, 2) +
                       Shapes{{"model.layers.0.mlp.experts.gate_up_proj", {2, 4, 12}},
                              {"model.layers.0.mlp.experts.gate_up_proj_bias", {2, 12}},
                              {"model.layers.0.mlp.experts.down_proj", {2, 6, 4}},
                              {"model.layers.0.mlp.experts.down_proj_bias", {2, 4}},
                              {"model.layers.0.self_attn.sinks", {2}}},
                   All(kPreNorms, RoundedOnce("1e-05"))});
  cases.push_back({"bitnet",
                   Gammas(kPreNorms) + GateUpDown(kMlp) + Gammas({kMlp + ".ffn_sub_norm"}, 6) +
                       Gammas({"model.layers.0.self_attn.attn_sub_norm"}),
                   All(kPreNorms, Rms("1e-05")) + All({kMlp + ".ffn_sub_norm"}, Rms("1e-05", "6")) +
                       All({"model.layers.0.self_attn.attn_sub_norm"}, Rms("1e-05")) +
                       All({kMlp}, "gated: gate, up, down [out, in], inner norm; relu_squared; d 4, h 6; F32")});
  cases.push_back({"gpt2",
                   GammasAndBetas({"h.0.ln_1", "h.0.ln_2", "ln_f"}) + Biased("h.0.mlp.c_fc", {4, 6}, 6) +
                       Biased("h.0.mlp.c_proj", {6, 4}, 4) + Biased("h.0.attn.c_attn", {4, 12}, 12) +
                       Biased("h.0.attn.c_proj", {4, 4}, 4) + Matrix("wte", {9, 4}),
                   All({"h.0.ln_1", "h.0.ln_2", "ln_f"}, WithBeta("1e-05")) +
                       All({"h.0.mlp"}, "plain: up, down [in, out], biases; gelu_tanh; d 4, h 6; F32")});
  const std::string neox = "gpt_neox.layers.0.";
  const std::vector<std::string> neox_norms = {neox + "input_layernorm", neox + "post_attention_layernorm",
                                               "gpt_neox.final_layer_norm"};
  const std::string biased_gelu = "plain: up, down [out, in], biases; gelu; d 4, h 6; F32";
  cases.push_back({"gpt_neox",
                   GammasAndBetas(neox_norms) + Biased(neox + "mlp.dense_h_to_4h", {6, 4}, 6) +
                       Biased(neox + "mlp.dense_4h_to_h", {4, 6}, 4),
                   All(neox_norms, WithBeta("1e-05")) + All({neox + "mlp"}, biased_gelu)});
  const std::string falcon = "transformer.h.0.";
  const std::vector<std::string> falcon_norms = {falcon + "ln_attn", falcon + "ln_mlp", falcon + "input_layernorm",
                                                 falcon + "post_attention_layernorm", "transformer.ln_f"};
  cases.push_back(
      {"falcon",
       GammasAndBetas(falcon_norms) + Matrix(falcon + "mlp.dense_h_to_4h", {6, 4}) +
           Matrix(falcon + "mlp.dense_4h_to_h", {4, 6}),
       All(falcon_norms, WithBeta("1e-05")) + All({falcon + "mlp"}, "plain: up, down [out, in]; gelu; d 4, h 6; F32")});
  const std::string bert = "bert.encoder.layer.0.";
  const std::vector<std::string> bert_norms = {"bert.embeddings.LayerNorm", bert + "attention.output.LayerNorm",
                                               bert + "output.LayerNorm", "cls.predictions.transform.LayerNorm"};
  cases.push_back({"bert",
                   GammasAndBetas(bert_norms) + Biased(bert + "intermediate.dense", {6, 4}, 6) +
                       Biased(bert + "output.dense", {4, 6}, 4) + Biased(bert + "attention.output.dense", {4, 4}, 4),
                   All(bert_norms, WithBeta("1e-12")) + All({bert + "ffn"}, biased_gelu)});
  const std::string opt = "model.decoder.layers.0";
  const std::vector<std::string> opt_norms = {opt + ".self_attn_layer_norm", opt + ".final_layer_norm",
                                              "model.decoder.final_layer_norm"};
  cases.push_back(
      {"opt", GammasAndBetas(opt_norms) + Biased(opt + ".fc1", {6, 4}, 6) + Biased(opt + ".fc2", {4, 6}, 4),
       All(opt_norms, WithBeta("1e-05")) + All({opt}, "plain: up, down [out, in], biases; relu; d 4, h 6; F32")});
  cases.push_back(
      {"starcoder2",
       GammasAndBetas(kPreNorms) + Biased(kMlp + ".c_fc", {6, 4}, 6) + Biased(kMlp + ".c_proj", {4, 6}, 4),
       All(kPreNorms, WithBeta("1e-05")) + All({kMlp}, "plain: up, down [out, in], biases; gelu_tanh; d 4, h 6; F32")});
  cases.push_back({"stablelm", GammasAndBetas(kPreNorms) + GateUpDown(kMlp),
                   All(kPreNorms, WithBeta("1e-05")) + All({kMlp}, kSwiGlu)});
  const std::vector<std::string> cohere = {"model.layers.0.input_layernorm", "model.norm"};
  cases.push_back({"cohere", Gammas(cohere) + GateUpDown(kMlp) + Shapes{{kHeadNorms[0] + ".weight", {2, 2}}},
                   All(cohere, "layer_norm; eps 1e-05; after_gamma; d 4; F32") + All({kMlp}, kSwiGlu)});
  cases.push_back({"nemotron",
                   GammasAndBetas(kPreNorms) + Matrix(kMlp + ".up_proj", {6, 4}) + Matrix(kMlp + ".down_proj", {4, 6}),
                   All(kPreNorms, "layer_norm, bias; eps 1e-05; after_gamma; gamma + 1; d 4; F32") +
                       All({kMlp}, "plain: up, down [out, in]; relu_squared; d 4, h 6; F32")});
  return cases;
}

class CheckpointFamilies : public ::testing::TestWithParam<Case> {};

TEST_P(CheckpointFamilies, DefaultsOfTheFamily) {
  const Case& one = GetParam();
  const Model model(one.tensors, "{\"model_type\":\"" + one.model_type + "\"}");
  const auto checkpoint = model.Open();
  EXPECT_EQ(Described(checkpoint), one.layers);
  ASSERT_TRUE(checkpoint.ok());
  EXPECT_EQ(checkpoint->family(), one.model_type);
  for (const auto& layer : checkpoint->layers()) {
    const auto read = layer->Read();
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_FALSE(layer->info().inferred.empty());
    EXPECT_FALSE(layer->info().uploaded);
    for (const auto& [role, name] : layer->info().tensors) {
      EXPECT_TRUE(SameBits(WeightOf(read, role), TensorNamed(name, one.tensors.at(name)))) << name;
    }
  }
}

// The keys of config.json that each family has go over its defaults.
TEST_P(CheckpointFamilies, ConfigGoesOverDefaults) {
  const Case& one = GetParam();
  const Family& family = *FindFamily(one.model_type);
  for (const bool inner : {false, true}) {
    std::string keys = "\"model_type\":\"" + one.model_type + "\"";
    std::string activation = family.activation_keys;
    activation = activation.substr(0, activation.find(' '));
    keys += ",\"" + activation + "\":\"sigmoid\"";
    for (const absl::string_view key : absl::StrSplit(family.epsilon_keys, ' ', absl::SkipEmpty())) {
      absl::StrAppend(&keys, ",\"", key, "\":0.25");
    }
    const Model model(
        one.tensors,
        inner ? "{\"model_type\":\"other\",\"vision_config\":{},\"text_config\":{" + keys + "}}" : "{" + keys + "}");
    const auto checkpoint = model.Open();
    for (const auto& [name, text] : Described(checkpoint)) {
      const bool fixed = *family.epsilon_keys == '\0' || absl::StrContains(name, "_a_layernorm");
      if (absl::StrContains(text, "norm; eps") || absl::StrContains(text, "bias; eps")) {
        EXPECT_EQ(absl::StrContains(text, "eps 0.25;"), !fixed) << name << ": " << text;
      } else {
        EXPECT_THAT(text, HasSubstr("; sigmoid; d")) << name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointFamilies, ::testing::ValuesIn(Cases()),
                         [](const auto& one) { return one.param.model_type; });

TEST(Families, EachHasACase) {
  std::set<std::string> tested, known;
  for (const Case& one : Cases()) tested.insert(one.model_type);
  for (const Family& family : KnownFamilies()) known.insert(family.model_type);
  EXPECT_EQ(tested, known);
}

TEST(Families, EachStandsInTheDocumentation) {
  const std::string text = ReadWhole(absl::StrCat(LAYERD_SOURCE_DIR, "/docs/checkpoints.md"));
  std::set<std::string> documented;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, "| ")) continue;
    const std::vector<std::string> cells = absl::StrSplit(line, '|');
    for (const absl::string_view word : absl::StrSplit(cells[1], absl::ByAnyChar(" ,("))) documented.emplace(word);
  }
  for (const Family& family : KnownFamilies())
    EXPECT_TRUE(documented.count(family.model_type) > 0) << family.model_type;
}

TEST(CheckpointFamily, TellsWhereEachOptionIsFrom) {
  const Model model(Gammas(kPreNorms) + GateUpDown(kMlp),
                    R"({"model_type":"llama","hidden_act":"silu","rms_norm_eps":1e-5})");
  const auto checkpoint = model.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(InferredOf(checkpoint, "model.norm"),
              ElementsAre("kind: rms_norm (family llama)", "epsilon: 1e-05 (config.json: rms_norm_eps)",
                          "rounding: before_gamma (family llama)"));
  EXPECT_THAT(InferredOf(checkpoint, kMlp),
              ElementsAre("form: gated (family llama)", "packing: separate (family llama)",
                          "layout: out_in (family llama)", "activation: silu (config.json: hidden_act)"));
  const Model bare(Gammas(kPreNorms) + GateUpDown(kMlp), R"({"model_type":"gemma"})");
  EXPECT_THAT(InferredOf(bare.Open(), "model.norm"),
              ElementsAre("kind: rms_norm (family gemma)", "epsilon: 1e-06 (default of gemma)",
                          "rounding: after_gamma (family gemma)", "gamma_offset: 1.0 (family gemma)"));
}

TEST(CheckpointFamily, WhereItsModulesMayStand) {
  for (const char* root : {"", "model.", "language_model.", "language_model.model.", "model.language_model."}) {
    const Model model(GateUpDown(absl::StrCat(root, "layers.7.mlp")) + Gammas({absl::StrCat(root, "norm")}),
                      R"({"model_type":"llama"})");
    EXPECT_EQ(Described(model.Open()), (Descriptions{{absl::StrCat(root, "layers.7.mlp"), kSwiGlu},
                                                     {absl::StrCat(root, "norm"), Rms("1e-06")}}));
  }
  const Model gpt2(GammasAndBetas({"transformer.h.10.ln_1"}), R"({"model_type":"gpt2"})");
  EXPECT_EQ(Described(gpt2.Open()), (Descriptions{{"transformer.h.10.ln_1", WithBeta("1e-05")}}));
}

// What the text model's keys say is nothing for the vision model beside it.
TEST(CheckpointFamily, OtherPartsOfAMultimodalModelStayOpen) {
  const std::string vision = "vision_tower.vision_model.encoder.layers.0";
  const Model model(Gammas({"language_model.model.norm"}) + GateUpDown("language_model.model.layers.0.mlp") +
                        GammasAndBetas({vision + ".layer_norm1"}) + Biased(vision + ".mlp.fc1", {6, 4}, 6) +
                        Biased(vision + ".mlp.fc2", {4, 6}, 4),
                    R"({"model_type":"gemma3","hidden_act":"relu","layer_norm_eps":0.5,
                        "text_config":{"model_type":"gemma3_text","hidden_activation":"gelu_pytorch_tanh"},
                        "vision_config":{"hidden_act":"quick_gelu","layer_norm_eps":1e-6}})");
  const auto checkpoint = model.Open();
  auto described = Described(checkpoint);
  EXPECT_EQ(described["language_model.model.layers.0.mlp"], kGeGlu);
  EXPECT_EQ(described["language_model.model.norm"], Gemma());
  EXPECT_EQ(described.size(), 4);
  ExpectUnusable(StatusOf(checkpoint, vision + ".mlp"), "LAYER_OPTIONS_OPEN", {"activation", "layerd.json"});
  ExpectUnusable(StatusOf(checkpoint, vision + ".layer_norm1"), "LAYER_OPTIONS_OPEN", {"epsilon"});
  // Neither are its outer keys where no family is known.
  const Model unknown(GateUpDown("visual.blocks.0.mlp"),
                      R"({"model_type":"x","hidden_act":"silu","vision_config":{}})");
  ExpectUnusable(StatusOf(unknown.Open(), "visual.blocks.0.mlp"), "LAYER_OPTIONS_OPEN", {"activation"});
}

TEST(CheckpointFamily, ConfigOfTheFamilysOwnObjectComesFirst) {
  const Shapes tensors = Gammas({"model.norm"});
  const Model text(tensors,
                   R"({"model_type":"x","rms_norm_eps":0.5,"text_config":{"model_type":"llama","rms_norm_eps":0.25}})");
  EXPECT_THAT(InferredOf(text.Open(), "model.norm")[1], "epsilon: 0.25 (config.json: text_config.rms_norm_eps)");
  const Model top(tensors, R"({"model_type":"llama","rms_norm_eps":0.5,"text_config":{"rms_norm_eps":0.25}})");
  EXPECT_THAT(InferredOf(top.Open(), "model.norm")[1], "epsilon: 0.5 (config.json: rms_norm_eps)");
  const Model null(tensors, R"({"model_type":"llama","rms_norm_eps":null,"text_config":{"rms_norm_eps":0.25}})");
  EXPECT_THAT(InferredOf(null.Open(), "model.norm")[1], "epsilon: 0.25 (config.json: text_config.rms_norm_eps)");
}

TEST(CheckpointFamily, FirstGemmasGeluIsTheTanhForm) {
  const auto activation = [](const std::string& config) {
    return InferredOf(Model(GateUpDown(kMlp), config).Open(), kMlp)[3];
  };
  EXPECT_EQ(activation(R"({"model_type":"gemma","hidden_act":"gelu"})"),
            "activation: gelu_tanh (config.json: hidden_act, as family gemma means it)");
  EXPECT_EQ(activation(R"({"model_type":"gemma","hidden_act":"gelu","hidden_activation":"relu"})"),
            "activation: relu (config.json: hidden_activation)");
  EXPECT_EQ(activation(R"({"model_type":"gemma","hidden_act":"gelu","hidden_activation":null})"),
            "activation: gelu_tanh (config.json: hidden_act, as family gemma means it)");
  EXPECT_EQ(activation(R"({"model_type":"llama","hidden_act":"gelu"})"), "activation: gelu (config.json: hidden_act)");
}

TEST(CheckpointFamily, LegacyNamesOfBertsNorms) {
  const Model model({{"bert.encoder.layer.1.output.LayerNorm.gamma", {4}},
                     {"bert.encoder.layer.1.output.LayerNorm.beta", {4}},
                     {"bert.embeddings.LayerNorm.gamma", {4}},
                     {"bert.embeddings.LayerNorm.weight", {4}},
                     {"bert.encoder.layer.2.output.LayerNorm.beta", {4}}},
                    R"({"model_type":"bert"})");
  const auto checkpoint = model.Open();
  EXPECT_EQ(Described(checkpoint)["bert.encoder.layer.1.output.LayerNorm"], WithBeta("1e-12"));
  ExpectUnusable(StatusOf(checkpoint, "bert.embeddings.LayerNorm"), "LAYER_AMBIGUOUS", {"LayerNorm.gamma", "both"});
  ExpectUnusable(StatusOf(checkpoint, "bert.encoder.layer.2.output.LayerNorm"), "LAYER_INCOMPLETE",
                 {"LayerNorm.beta", "no \"bert.encoder.layer.2.output.LayerNorm.weight\""});
}

TEST(CheckpointFamily, BiasesAreTakenWhereTheyAre) {
  const Model model(GateUpDown(kMlp) + Shapes{{kMlp + ".gate_proj.bias", {6}}, {kMlp + ".down_proj.bias", {4}}},
                    R"({"model_type":"llama"})");
  const auto checkpoint = model.Open();
  EXPECT_EQ(Described(checkpoint)[kMlp], "gated: gate, up, down [out, in], biases; silu; d 4, h 6; F32");
  EXPECT_THAT((*checkpoint->Find(kMlp))->info().tensors,
              UnorderedElementsAre(
                  std::pair("gate", kMlp + ".gate_proj.weight"), std::pair("up", kMlp + ".up_proj.weight"),
                  std::pair("down", kMlp + ".down_proj.weight"), std::pair("gate_bias", kMlp + ".gate_proj.bias"),
                  std::pair("down_bias", kMlp + ".down_proj.bias")));
}

TEST(CheckpointFamily, NonsenseInConfigLeavesOnlyWhatNeedsItOpen) {
  const Shapes tensors = Gammas({"model.norm"}) + GateUpDown(kMlp);
  for (const char* eps : {"-1", "\"1e-5\"", "[1]", "true", "{}"}) {
    const Model model(tensors, absl::StrCat("{\"model_type\":\"llama\",\"rms_norm_eps\":", eps, "}"));
    const auto checkpoint = model.Open();
    ExpectUnusable(StatusOf(checkpoint, "model.norm"), "LAYER_OPTIONS_OPEN",
                   {"epsilon (config.json: rms_norm_eps: expected a number of 0 or more, got", eps});
    EXPECT_TRUE(StatusOf(checkpoint, kMlp).ok());
  }
  for (const char* activation : {"\"mish\"", "\"gelu_10\"", "3", "\"\""}) {
    const Model model(tensors, absl::StrCat("{\"model_type\":\"llama\",\"hidden_act\":", activation, "}"));
    const auto checkpoint = model.Open();
    ExpectUnusable(StatusOf(checkpoint, kMlp), "LAYER_OPTIONS_OPEN",
                   {"activation (config.json: hidden_act: expected one of silu, swish, gelu", activation});
    EXPECT_TRUE(StatusOf(checkpoint, "model.norm").ok());
    // The caller may know it.
    EXPECT_TRUE(StatusOf(model.Open({.activation = Activation::kRelu}), kMlp).ok());
  }
}

TEST(CheckpointFamily, HintsGoOverTheFiles) {
  const Model model(Gammas({"model.norm"}) + GateUpDown(kMlp),
                    R"({"model_type":"llama","hidden_act":"silu","rms_norm_eps":1e-5})");
  const auto checkpoint =
      model.Open({.activation = Activation::kGelu, .norm_epsilon = 0.0, .norm_rounding = NormRounding::kAfterGamma});
  auto described = Described(checkpoint);
  EXPECT_EQ(described[kMlp], "gated: gate, up, down [out, in]; gelu; d 4, h 6; F32");
  EXPECT_EQ(described["model.norm"], "rms_norm; eps 0.0; after_gamma; d 4; F32");
  EXPECT_THAT(
      InferredOf(checkpoint, "model.norm"),
      ElementsAre("kind: rms_norm (family llama)", "epsilon: 0.0 (the caller)", "rounding: after_gamma (the caller)"));
  // The files' epsilon is that of their own kind of norm.
  const auto other = model.Open({.norm_kind = NormKind::kLayerNorm});
  const absl::Status status = StatusOf(other, "model.norm");
  ExpectUnusable(status, "LAYER_OPTIONS_OPEN", {"leave open: epsilon;"});
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("rounding")));
  EXPECT_EQ(Described(model.Open({.norm_kind = NormKind::kLayerNorm, .norm_epsilon = 0.5}))["model.norm"],
            "layer_norm; eps 0.5; after_gamma; d 4; F32");
}

}  // namespace
}  // namespace layerd
