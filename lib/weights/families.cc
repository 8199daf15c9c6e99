#include "lib/weights/families.h"

namespace layerd {
namespace {

constexpr auto kPlain = FeedForwardForm::kPlain;
constexpr auto kLayerNorm = NormKind::kLayerNorm;
// PyTorch's LayerNorm, like OLMo2's, gpt-oss' and Gemma's RMSNorm, computes in float32 and rounds once.
constexpr auto kAfterGamma = NormRounding::kAfterGamma;

constexpr FeedForwardNames kGateUpDown = {
    .gate = "gate_proj", .up = "up_proj", .down = "down_proj", .inner_norm = "ffn_sub_norm"};
constexpr FeedForwardNames kW1W3W2 = {.gate = "w1", .up = "w3", .down = "w2"};
constexpr FeedForwardNames kPacked = {
    .packing = GateUpPacking::kHalves, .gate_up = "gate_up_proj", .down = "down_proj"};
constexpr FeedForwardNames kUpDown = {.form = kPlain, .up = "up_proj", .down = "down_proj"};
// GPT-2's Conv1D has its matrices [in, out]; others gave the same names to nn.Linear.
constexpr FeedForwardNames kConv1D = {.form = kPlain, .layout = WeightLayout::kInOut, .up = "c_fc", .down = "c_proj"};
constexpr FeedForwardNames kLinearLikeConv1D = {.form = kPlain, .up = "c_fc", .down = "c_proj"};
constexpr FeedForwardNames kEitherConv1D = {.form = kPlain, .layout = std::nullopt, .up = "c_fc", .down = "c_proj"};
constexpr FeedForwardNames kFourH = {.form = kPlain, .up = "dense_h_to_4h", .down = "dense_4h_to_h"};
constexpr FeedForwardNames kFc1Fc2 = {.form = kPlain, .up = "fc1", .down = "fc2"};
constexpr FeedForwardNames kBertNames = {
    .form = kPlain, .up = "intermediate.dense", .down = "output.dense", .name_suffix = ".ffn"};

constexpr FeedForwardNames kWellKnown[] = {kGateUpDown, kW1W3W2, kPacked, kEitherConv1D, kFourH, kFc1Fc2, kBertNames};

constexpr char kWithHeadNorms[] =
    "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm layers.{i}.self_attn.q_norm "
    "layers.{i}.self_attn.k_norm norm";
constexpr char kGemma2Norms[] =
    "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm layers.{i}.pre_feedforward_layernorm "
    "layers.{i}.post_feedforward_layernorm norm";
constexpr char kGemma3Norms[] =
    "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm layers.{i}.pre_feedforward_layernorm "
    "layers.{i}.post_feedforward_layernorm layers.{i}.self_attn.q_norm layers.{i}.self_attn.k_norm norm";
constexpr char kMixedExperts[] = "layers.{i}.mlp layers.{i}.mlp.experts.{i} layers.{i}.mlp.shared_expert";
constexpr char kDeepSeekExperts[] = "layers.{i}.mlp layers.{i}.mlp.experts.{i} layers.{i}.mlp.shared_experts";
// Their classes do not get config.json's epsilon.
constexpr char kLatentNorms[] = "layers.{i}.self_attn.q_a_layernorm layers.{i}.self_attn.kv_a_layernorm";

// What a row leaves out is as in Llama.
constexpr Family kFamilies[] = {
    {.model_type = "llama", .names = &kGateUpDown},
    {.model_type = "mistral", .names = &kGateUpDown},
    {.model_type = "mixtral",
     .epsilon = 1e-5,
     .feed_forwards = "layers.{i}.block_sparse_moe.experts.{i}",
     .names = &kW1W3W2},
    {.model_type = "qwen2", .names = &kGateUpDown},
    {.model_type = "qwen2_moe", .feed_forwards = kMixedExperts, .names = &kGateUpDown},
    {.model_type = "qwen3", .norms = kWithHeadNorms, .names = &kGateUpDown},
    {.model_type = "qwen3_moe", .norms = kWithHeadNorms, .feed_forwards = kMixedExperts, .names = &kGateUpDown},
    {.model_type = "deepseek_v2",
     .fixed_epsilon_norms = kLatentNorms,
     .feed_forwards = kDeepSeekExperts,
     .names = &kGateUpDown},
    {.model_type = "deepseek_v3",
     .fixed_epsilon_norms = kLatentNorms,
     .feed_forwards = kDeepSeekExperts,
     .names = &kGateUpDown},
    {.model_type = "gemma",
     .rounding = kAfterGamma,
     .gamma_offset = 1,
     .names = &kGateUpDown,
     .activation_keys = "hidden_activation hidden_act",
     .activation = Activation::kGeluTanh,
     .gelu_means_tanh = true},
    {.model_type = "gemma2",
     .norms = kGemma2Norms,
     .rounding = kAfterGamma,
     .gamma_offset = 1,
     .names = &kGateUpDown,
     .activation_keys = "hidden_activation",
     .activation = Activation::kGeluTanh},
    {.model_type = "gemma3",
     .norms = kGemma3Norms,
     .rounding = kAfterGamma,
     .gamma_offset = 1,
     .names = &kGateUpDown,
     .activation_keys = "hidden_activation",
     .activation = Activation::kGeluTanh},
    {.model_type = "gemma3_text",
     .norms = kGemma3Norms,
     .rounding = kAfterGamma,
     .gamma_offset = 1,
     .names = &kGateUpDown,
     .activation_keys = "hidden_activation",
     .activation = Activation::kGeluTanh},
    {.model_type = "phi3", .epsilon = 1e-5, .names = &kPacked},
    {.model_type = "glm", .epsilon = 1.5625e-7, .names = &kPacked},
    {.model_type = "glm4",
     .norms = "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm layers.{i}.post_self_attn_layernorm "
              "layers.{i}.post_mlp_layernorm norm",
     .epsilon = 1.5625e-7,
     .names = &kPacked},
    // q_norm and k_norm are over the whole row here, as the length of their γ tells.
    {.model_type = "olmo2",
     .norms = "layers.{i}.post_attention_layernorm layers.{i}.post_feedforward_layernorm layers.{i}.self_attn.q_norm "
              "layers.{i}.self_attn.k_norm norm",
     .rounding = kAfterGamma,
     .epsilon = 1e-5,
     .names = &kGateUpDown},
    // Its norms have no weights.
    {.model_type = "olmo",
     .norms = "",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon = 1e-5,
     .names = &kGateUpDown},
    // Its experts are no dense layers.
    {.model_type = "gpt_oss", .rounding = kAfterGamma, .epsilon = 1e-5, .feed_forwards = "", .names = &kGateUpDown},
    {.model_type = "bitnet",
     .norms = "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm layers.{i}.self_attn.attn_sub_norm "
              "layers.{i}.mlp.ffn_sub_norm norm",
     .epsilon = 1e-5,
     .names = &kGateUpDown,
     .activation = Activation::kReluSquared},
    {.model_type = "gpt2",
     .roots = ". transformer.",
     .norms = "h.{i}.ln_1 h.{i}.ln_2 ln_f",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "layer_norm_epsilon",
     .epsilon = 1e-5,
     .feed_forwards = "h.{i}.mlp",
     .names = &kConv1D,
     .activation_keys = "activation_function",
     .activation = Activation::kGeluTanh},
    {.model_type = "gpt_neox",
     .roots = ". gpt_neox.",
     .norms = "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm final_layer_norm",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "layer_norm_eps",
     .epsilon = 1e-5,
     .names = &kFourH,
     .activation = Activation::kGelu},
    {.model_type = "falcon",
     .roots = ". transformer.",
     .norms = "h.{i}.input_layernorm h.{i}.post_attention_layernorm h.{i}.ln_attn h.{i}.ln_mlp ln_f",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "layer_norm_epsilon",
     .epsilon = 1e-5,
     .feed_forwards = "h.{i}.mlp",
     .names = &kFourH,
     .activation_keys = "activation",
     .activation = Activation::kGelu},
    {.model_type = "bert",
     .roots = ". bert.",
     .norms = "embeddings.LayerNorm encoder.layer.{i}.attention.output.LayerNorm encoder.layer.{i}.output.LayerNorm "
              "cls.predictions.transform.LayerNorm",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "layer_norm_eps",
     .epsilon = 1e-12,
     .feed_forwards = "encoder.layer.{i}",
     .names = &kBertNames,
     .activation = Activation::kGelu},
    {.model_type = "opt",
     .roots = ". model.",
     .norms = "decoder.layers.{i}.self_attn_layer_norm decoder.layers.{i}.final_layer_norm decoder.final_layer_norm",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "",
     .epsilon = 1e-5,
     .feed_forwards = "decoder.layers.{i}",
     .names = &kFc1Fc2,
     .activation_keys = "activation_function",
     .activation = Activation::kRelu},
    {.model_type = "starcoder2",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "norm_epsilon",
     .epsilon = 1e-5,
     .names = &kLinearLikeConv1D,
     .activation = Activation::kGeluTanh},
    {.model_type = "stablelm",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "layer_norm_eps norm_eps",
     .epsilon = 1e-5,
     .names = &kGateUpDown},
    // q_norm and k_norm, where it has them, have a γ of their own for each head.
    {.model_type = "cohere",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .epsilon_keys = "layer_norm_eps",
     .epsilon = 1e-5,
     .names = &kGateUpDown},
    {.model_type = "nemotron",
     .kind = kLayerNorm,
     .rounding = kAfterGamma,
     .gamma_offset = 1,
     .epsilon_keys = "norm_eps",
     .epsilon = 1e-5,
     .names = &kUpDown,
     .activation = Activation::kReluSquared},
};

}  // namespace

absl::Span<const Family> KnownFamilies() { return kFamilies; }

const Family* FindFamily(std::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (model_type == family.model_type) return &family;
  }
  return nullptr;
}

absl::Span<const FeedForwardNames> WellKnownFeedForwardNames() { return kWellKnown; }

}  // namespace layerd
