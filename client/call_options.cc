#include "client/call_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tensor_source.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/layers/seeded.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/safetensors.h"

namespace layerd {
namespace {

const std::map<std::string, DType> kDTypes = {
    {"float32", DType::kFloat32}, {"float16", DType::kFloat16}, {"bfloat16", DType::kBFloat16}};
const std::map<std::string, NormKind> kKinds = {{"rms_norm", NormKind::kRmsNorm}, {"layer_norm", NormKind::kLayerNorm}};
const std::map<std::string, NormRounding> kRoundings = {{"before_gamma", NormRounding::kBeforeGamma},
                                                        {"after_gamma", NormRounding::kAfterGamma}};
const std::map<std::string, GatePosition> kGatePositions = {
    {"none", GatePosition::kNone}, {"first", GatePosition::kFirst}, {"last", GatePosition::kLast}};
const std::map<std::string, FeedForwardForm> kForms = {{"gated", FeedForwardForm::kGated},
                                                       {"plain", FeedForwardForm::kPlain}};
const std::map<std::string, Activation> kActivations = {
    {"identity", Activation::kIdentity},        {"sigmoid", Activation::kSigmoid}, {"relu", Activation::kRelu},
    {"relu_squared", Activation::kReluSquared}, {"gelu", Activation::kGelu},       {"gelu_tanh", Activation::kGeluTanh},
    {"quick_gelu", Activation::kQuickGelu},     {"silu", Activation::kSilu}};
const std::map<std::string, GateUpPacking> kPackings = {{"separate", GateUpPacking::kSeparate},
                                                        {"halves", GateUpPacking::kHalves},
                                                        {"interleaved", GateUpPacking::kInterleaved}};
const std::map<std::string, WeightLayout> kLayouts = {{"in_out", WeightLayout::kInOut},
                                                      {"out_in", WeightLayout::kOutIn}};

// An option whose value is one of the names in `names`.
template <typename T, typename Target>
void AddChoice(CLI::App& app, const std::string& flag, Target& target, const std::map<std::string, T>& names,
               std::string help) {
  std::string choices;
  for (const auto& [name, value] : names) absl::StrAppend(&choices, choices.empty() ? "" : "|", name);
  app.add_option_function<std::string>(
         flag, [&target, &names](const std::string& name) { target = names.at(name); }, std::move(help))
      ->check(CLI::IsMember(names))
      ->type_name(choices);
}

constexpr char kTensorType[] = "TENSOR";

// "--gate-up" for the weight "gate_up".
std::string FlagOf(std::string_view weight) {
  std::string flag = absl::StrCat("--", std::string(weight));
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

void RegisterCommon(CLI::App& app, CommonCallOptions& options) {
  auto* input = app.add_option("--input", options.input,
                               "the input: FILE.npy, FILE.safetensors:NAME, or a list such as '[0.5,-1.5,2,1]'");
  input->type_name(kTensorType);
  AddChoice(app, "--dtype", options.dtype, kDTypes, "dtype of typed and of seeded tensors (float32)");
  AddChoice(app, "--output-dtype", options.output_dtype, kDTypes, "dtype of the answer (the input's)");
  app.add_flag("--verify", options.verify, "let the server compute the layer in float64 too, and report the error");
  app.add_flag("--intermediates", options.intermediates, "answer the values inside too");
  auto* weights_file = app.add_option("--weights", options.weights_file,
                                      "a safetensors checkpoint to take the layer from, with --prefix");
  app.add_option("--prefix", options.prefix, "the layer's name in the checkpoint, for example model.layers.0.mlp")
      ->needs(weights_file);
  app.add_option("--seed", options.seed, "make what is not given from this seed (docs/seeded.md), with --dim")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--rows", options.rows, "rows of the seeded input (4)")
      ->check(CLI::Range(0, 1 << 20))
      ->excludes(input);
  app.add_option("--dim", options.dim, "width of the seeded input")->check(CLI::Range(1, 1 << 20))->excludes(input);
}

absl::Status NeedOption(std::string_view option, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(option), ": needed, since ", std::string(why)));
}

absl::StatusOr<Tensor> ReadNamed(std::string_view option, const std::string& text, DType dtype) {
  auto tensor = ReadTensor(text, dtype);
  if (!tensor.ok()) return Under(option, tensor.status());
  return tensor;
}

absl::Status ReadOptional(std::string_view option, const std::string& text, DType dtype, std::optional<Tensor>& to) {
  if (text.empty()) return absl::OkStatus();
  auto tensor = ReadNamed(option, text, dtype);
  if (!tensor.ok()) return tensor.status();
  to = *std::move(tensor);
  return absl::OkStatus();
}

absl::StatusOr<Tensor> InputOf(const CommonCallOptions& options) {
  if (!options.input.empty()) return ReadNamed("--input", options.input, options.dtype);
  if (!options.seed) return NeedOption("--input", "no --seed is given");
  if (options.dim == 0) return NeedOption("--dim", "--seed makes the input");
  return SeededInput(*options.seed, options.dtype, {options.rows, options.dim});
}

absl::StatusOr<SafetensorsFile> OpenCheckpoint(const CommonCallOptions& options) {
  if (options.prefix.empty()) return NeedOption("--prefix", "--weights is given");
  return SafetensorsFile::Open(options.weights_file);
}

}  // namespace

void NormalizeOptions::Register(CLI::App& app) {
  RegisterCommon(app, common);
  AddChoice(app, "--kind", kind, kKinds, "which norm; a checkpoint may tell");
  app.add_option("--eps", spec.epsilon, "epsilon (1e-6 for rms_norm, 1e-5 for layer_norm; a checkpoint may tell)");
  app.add_option("--gamma", gamma, "γ; default 1")->type_name(kTensorType);
  app.add_option("--beta", beta, "β; default 0")->type_name(kTensorType);
  app.add_option("--residual", residual, "added to the input first; the sum is answered too")->type_name(kTensorType);
  app.add_option("--gate", gate, "the gate, with --gate-position")->type_name(kTensorType);
  AddChoice(app, "--gate-position", spec.gate_position, kGatePositions, "where silu(gate) multiplies in (none)");
  AddChoice(app, "--rounding", spec.rounding, kRoundings, "needed where γ meets a 16-bit input");
  app.add_option("--gamma-offset", spec.gamma_offset, "added to γ: 1 for Gemma (0)");
  app.add_option("--group-size", spec.group_size, "statistics per group of so many elements (0: whole row)");
  app.add_option("--axes", spec.normalized_axes, "normalise over so many of the last axes together (1)");
}

absl::StatusOr<NormalizeCall> NormalizeOptions::Build() const {
  NormalizeCall call;
  call.spec = spec;
  auto input = InputOf(common);
  if (!input.ok()) return input.status();
  call.inputs.input = *std::move(input);
  std::optional<NormKind> known_kind = kind;
  if (!common.weights_file.empty()) {
    const auto file = OpenCheckpoint(common);
    if (!file.ok()) return file.status();
    auto norm = ReadNorm(*file, common.prefix);
    if (!norm.ok()) return norm.status();
    call.inputs.gamma = std::move(norm->gamma);
    call.inputs.beta = std::move(norm->beta);
    if (!known_kind) known_kind = norm->kind;
    // The checkpoint's epsilon is that of its own kind.
    if (!call.spec.epsilon && known_kind == norm->kind) call.spec.epsilon = norm->epsilon;
  } else if (common.seed && gamma.empty() && call.inputs.input.rank() > 0) {
    int64_t dim = 1;
    for (int axis = std::max(0, call.inputs.input.rank() - call.spec.normalized_axes); axis < call.inputs.input.rank();
         ++axis) {
      dim *= call.inputs.input.dim(axis);
    }
    call.inputs.gamma = SeededGamma(*common.seed, common.dtype, dim);
    if (known_kind == NormKind::kLayerNorm) call.inputs.beta = SeededBeta(*common.seed, common.dtype, dim);
  }
  for (const auto& status : {ReadOptional("--gamma", gamma, common.dtype, call.inputs.gamma),
                             ReadOptional("--beta", beta, common.dtype, call.inputs.beta),
                             ReadOptional("--residual", residual, common.dtype, call.inputs.residual),
                             ReadOptional("--gate", gate, common.dtype, call.inputs.gate)}) {
    if (!status.ok()) return status;
  }
  if (!known_kind) return NeedOption("--kind", "nothing else tells which norm it is");
  call.spec.kind = *known_kind;
  call.output_dtype = common.output_dtype;
  call.verify = common.verify;
  call.intermediates = common.intermediates;
  return call;
}

void FeedForwardOptions::Register(CLI::App& app) {
  RegisterCommon(app, common);
  AddChoice(app, "--form", form, kForms, "gated or plain; a checkpoint tells");
  AddChoice(app, "--activation", activation, kActivations, "the activation; a checkpoint's config.json may tell");
  app.add_option("--swish-beta", swish_beta, "β of silu (1)");
  AddChoice(app, "--packing", packing, kPackings, "how gate and up come; a checkpoint tells");
  AddChoice(app, "--layout", layout, kLayouts, "axes of the matrices; a checkpoint tells; seeded: out_in");
  app.add_option("--gate-max", spec.gate_max, "upper limit of the gate");
  app.add_option("--up-limit", spec.up_limit, "limit of up, both ways");
  app.add_option("--up-offset", spec.up_offset, "added to up (0)");
  app.add_flag("--inner-norm", inner_norm, "RMSNorm before the last product");
  app.add_option("--inner-norm-eps", inner_norm_epsilon, "its epsilon (1e-6)");
  for (const char* name :
       {"gate", "up", "gate_up", "down", "gate_bias", "up_bias", "gate_up_bias", "down_bias", "inner_norm_gamma"}) {
    app.add_option(FlagOf(name), weights[name], "a weight of the layer")->type_name(kTensorType);
  }
  app.add_option("--hidden", hidden_dim, "hidden width of seeded weights")->check(CLI::Range(1, 1 << 20));
  app.add_flag("--biases", biases, "seeded weights with biases");
}

absl::StatusOr<FeedForwardCall> FeedForwardOptions::Build() const {
  FeedForwardCall call;
  call.spec = spec;
  auto input = InputOf(common);
  if (!input.ok()) return input.status();
  call.input = *std::move(input);
  bool activation_known = activation.has_value();
  bool form_known = form.has_value();
  bool layout_known = layout.has_value();
  bool packing_known = packing.has_value();
  const bool from_checkpoint = !common.weights_file.empty();
  if (from_checkpoint) {
    const auto file = OpenCheckpoint(common);
    if (!file.ok()) return file.status();
    auto layer = ReadFeedForward(*file, common.prefix);
    if (!layer.ok()) return layer.status();
    call.weights = std::move(layer->weights);
    call.spec.form = layer->spec.form;
    call.spec.packing = layer->spec.packing;
    call.spec.layout = layer->spec.layout;
    call.spec.activation = layer->spec.activation;
    call.spec.inner_norm = layer->spec.inner_norm;
    form_known = layout_known = packing_known = true;
    activation_known = activation_known || layer->activation_known;
  }
  if (form) call.spec.form = *form;
  if (packing) call.spec.packing = *packing;
  if (layout) call.spec.layout = *layout;
  if (activation) call.spec.activation.kind = *activation;
  if (swish_beta) {
    if (activation_known && call.spec.activation.kind != Activation::kSilu) {
      return absl::InvalidArgumentError("--swish-beta: expected nothing, since the activation is not silu");
    }
    call.spec.activation.beta = *swish_beta;
  }
  if (packing && call.spec.form == FeedForwardForm::kPlain) {
    return absl::InvalidArgumentError("--packing: expected nothing, since the plain form has no gate");
  }
  if (inner_norm || inner_norm_epsilon) call.spec.inner_norm = InnerNorm{inner_norm_epsilon};

  const bool any_given = std::any_of(weights.begin(), weights.end(), [](const auto& w) { return !w.second.empty(); });
  if (common.seed && !from_checkpoint && !any_given) {
    if (hidden_dim == 0) return NeedOption("--hidden", "--seed makes the weights");
    // A seeded layer is SwiGLU, [out, in], where nothing else is said.
    form_known = activation_known = layout_known = packing_known = true;
    call.weights =
        SeededFeedForwardWeights(*common.seed, call.spec, common.dtype, call.input.shape().back(), hidden_dim, biases);
  }
  FeedForwardWeights& to = call.weights;
  const std::pair<const char*, std::optional<Tensor>*> kFields[] = {{"gate", &to.gate},
                                                                    {"up", &to.up},
                                                                    {"gate_up", &to.gate_up},
                                                                    {"down", &to.down},
                                                                    {"gate_bias", &to.gate_bias},
                                                                    {"up_bias", &to.up_bias},
                                                                    {"gate_up_bias", &to.gate_up_bias},
                                                                    {"down_bias", &to.down_bias},
                                                                    {"inner_norm_gamma", &to.inner_norm_gamma}};
  for (const auto& [name, tensor] : kFields) {
    const auto given = weights.find(name);
    if (given == weights.end()) continue;
    if (auto status = ReadOptional(FlagOf(name), given->second, common.dtype, *tensor); !status.ok()) {
      return status;
    }
  }
  if (!form_known) return NeedOption("--form", "nothing else tells whether the layer is gated");
  if (!activation_known) return NeedOption("--activation", "nothing else tells the activation");
  if (!layout_known) return NeedOption("--layout", "the axes of a matrix are never guessed");
  if (!packing_known && call.spec.form == FeedForwardForm::kGated) {
    return NeedOption("--packing", "the layer is gated");
  }
  call.output_dtype = common.output_dtype;
  call.verify = common.verify;
  call.intermediates = common.intermediates;
  return call;
}

}  // namespace layerd
