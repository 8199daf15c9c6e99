#include "client/call_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/choice_option.h"
#include "client/layer_file.h"
#include "client/layer_options.h"
#include "client/seed_option.h"
#include "client/tensor_source.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/layers/layer.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

constexpr char kTensorType[] = "TENSOR";

// "--gate-up" for the weight "gate_up".
std::string FlagOf(std::string_view weight) {
  std::string flag = absl::StrCat("--", std::string(weight));
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

// Gives --layer, or null where it is not offered.
CLI::Option* RegisterCommon(CLI::App& app, LayerPlace place, CommonCallOptions& options) {
  auto* input = app.add_option("--input", options.input,
                               "the input: FILE.npy, FILE.safetensors:NAME, or a list such as '[0.5,-1.5,2,1]'");
  input->type_name(kTensorType);
  AddChoice(app, "--dtype", options.dtype, kDTypeNames, "dtype of typed and of seeded tensors (float32)");
  AddChoice(app, "--output-dtype", options.output_dtype, kDTypeNames, "dtype of the answer (the input's)");
  app.add_flag("--verify", options.verify, "let the server compute the layer in float64 too, and report the error");
  app.add_flag("--intermediates", options.intermediates, "answer the values inside too");
  auto* weights_file =
      app.add_option("--weights", options.weights_file,
                     "take the layer from a checkpoint (its folder or a safetensors file), with --prefix; or from a "
                     "file of `layers download`");
  app.add_option("--prefix", options.prefix, "the layer's name in the checkpoint, for example model.layers.0.mlp")
      ->needs(weights_file);
  app.add_option("--seed", options.seed, "make what is not given from this seed (docs/seeded.md), with --dim")
      ->check(SeedOf<uint64_t>());
  app.add_option("--rows", options.rows, "rows of the seeded input (4)")
      ->check(CLI::Range(0, 1 << 20))
      ->excludes(input);
  app.add_option("--dim", options.dim,
                 place == LayerPlace::kWithCall ? "width of the seeded input"
                                                : "width of the seeded input; by default that of --layer")
      ->check(CLI::Range(1, 1 << 20))
      ->excludes(input);
  if (place == LayerPlace::kWithCall) return nullptr;
  return app
      .add_option("--layer", options.layer,
                  "a layer of the server, models/MODEL/layers/LAYER; the options say what it is expected to be")
      ->excludes(weights_file);
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

// An option that would be ignored is refused.
absl::Status CheckSeedUsed(const CommonCallOptions& options) {
  const bool all_given = !options.input.empty() && (!options.layer.empty() || !options.weights_file.empty());
  if (!options.seed || !all_given) return absl::OkStatus();
  return absl::InvalidArgumentError("--seed: expected nothing, since input and layer are both given");
}

// What is the same for both calls beside the layer.
template <typename Call>
void SetCommon(const CommonCallOptions& options, Call& call) {
  call.layer = options.layer;
  call.output_dtype = options.output_dtype;
  call.verify = options.verify;
  call.intermediates = options.intermediates;
}

// The layer of --weights, which must be a One.
template <typename One>
absl::StatusOr<One> ReadLayerOf(const CommonCallOptions& options, const CheckpointHints& hints, std::string_view kind) {
  auto layer = ReadLayer(options.weights_file, options.prefix, hints);
  if (!layer.ok()) return layer.status();
  if (One* one = std::get_if<One>(&*layer)) return std::move(*one);
  return absl::InvalidArgumentError(absl::StrCat("--weights: expected ", std::string(kind), ", got another layer"));
}

// Elements of the last `axes` axes of `input`.
int64_t NormalizedElements(const Tensor& input, int axes) {
  int64_t elements = 1;
  for (int axis = std::max(0, input.rank() - axes); axis < input.rank(); ++axis) elements *= input.dim(axis);
  return elements;
}

}  // namespace

void NormalizeOptions::Register(CLI::App& app, LayerPlace place) {
  CLI::Option* layer = RegisterCommon(app, place, common);
  RegisterOptions(app, said);
  app.add_option("--axes", said.normalized_axes, "normalise over so many of the last axes together (1)");
  for (auto [flag, text, help] : {std::tuple("--gamma", &gamma, "γ; default 1"), {"--beta", &beta, "β; default 0"}}) {
    auto* option = app.add_option(flag, *text, help)->type_name(kTensorType);
    if (layer != nullptr) option->excludes(layer);
  }
  app.add_option("--residual", residual, "added to the input first; the sum is answered too")->type_name(kTensorType);
  app.add_option("--gate", gate, "the gate, with --gate-position")->type_name(kTensorType);
}

absl::StatusOr<NormalizeCall> NormalizeOptions::Build() const {
  NormalizeCall call;
  SetCommon(common, call);
  if (auto status = CheckSeedUsed(common); !status.ok()) return status;
  auto input = InputOf(common);
  if (!input.ok()) return input.status();
  call.inputs.input = *std::move(input);
  const Tensor& x = call.inputs.input;
  if (!common.layer.empty()) {
    if (auto status = CheckSayable(said); !status.ok()) return status;
    call.said = said;
  } else {
    bool kind_known = said.kind.has_value();
    if (!common.weights_file.empty()) {
      CheckpointHints hints = HintsOf(said, {});
      // For float32 both mean the same, and a checkpoint that leaves it open will do.
      if (!hints.norm_rounding && x.dtype() == DType::kFloat32) hints.norm_rounding = NormRounding::kAfterGamma;
      auto layer = ReadLayerOf<NormalizeLayer>(common, hints, "a norm");
      if (!layer.ok()) return layer.status();
      kind_known = true;
      call.spec = layer->spec;
      call.inputs.gamma = std::move(layer->weights.gamma);
      call.inputs.beta = std::move(layer->weights.beta);
    }
    if (!kind_known) return NeedOption("--kind", "nothing else tells which norm it is");
    if (auto status = PutOver(said, call.spec); !status.ok()) return status;
    if (common.seed && common.weights_file.empty() && gamma.empty() && x.rank() > 0) {
      const int64_t dim = NormalizedElements(x, call.spec.normalized_axes);
      call.inputs.gamma = SeededGamma(*common.seed, common.dtype, dim);
      if (call.spec.kind == NormKind::kLayerNorm) call.inputs.beta = SeededBeta(*common.seed, common.dtype, dim);
    }
  }
  for (const auto& status : {ReadOptional("--gamma", gamma, common.dtype, call.inputs.gamma),
                             ReadOptional("--beta", beta, common.dtype, call.inputs.beta),
                             ReadOptional("--residual", residual, common.dtype, call.inputs.residual),
                             ReadOptional("--gate", gate, common.dtype, call.inputs.gate)}) {
    if (!status.ok()) return status;
  }
  return call;
}

void FeedForwardOptions::Register(CLI::App& app, LayerPlace place) {
  CLI::Option* layer = RegisterCommon(app, place, common);
  RegisterOptions(app, said);
  std::vector<CLI::Option*> of_weights;
  for (const auto& [role, member] : kFeedForwardRoles) {
    const std::string name(role);
    of_weights.push_back(app.add_option(FlagOf(name), weights[name], "a weight of the layer")->type_name(kTensorType));
  }
  of_weights.push_back(
      app.add_option("--hidden", hidden_dim, "hidden width of seeded weights")->check(CLI::Range(1, 1 << 20)));
  of_weights.push_back(app.add_flag("--biases", biases, "seeded weights with biases"));
  if (layer == nullptr) return;
  for (CLI::Option* option : of_weights) option->excludes(layer);
}

absl::StatusOr<FeedForwardCall> FeedForwardOptions::Build() const {
  FeedForwardCall call;
  SetCommon(common, call);
  if (auto status = CheckSeedUsed(common); !status.ok()) return status;
  auto input = InputOf(common);
  if (!input.ok()) return input.status();
  call.input = *std::move(input);
  if (!common.layer.empty()) {
    if (auto status = CheckSayable(said); !status.ok()) return status;
    call.said = said;
    return call;
  }
  const bool any_given = std::any_of(weights.begin(), weights.end(), [](const auto& w) { return !w.second.empty(); });
  const bool from_file = !common.weights_file.empty();
  const bool seeded = common.seed && !from_file && !any_given;
  if (!seeded && (hidden_dim != 0 || biases)) {
    return absl::InvalidArgumentError("--hidden, --biases: expected nothing, since no weights are made from a seed");
  }
  if (from_file) {
    auto layer = ReadLayerOf<FeedForwardLayer>(common, HintsOf({}, said), "a feed-forward layer");
    if (!layer.ok()) return layer.status();
    call.spec = layer->spec;
    call.weights = std::move(layer->weights);
  }
  if (auto status = PutOver(said, call.spec); !status.ok()) return status;
  if (seeded) {
    // A seeded layer is SwiGLU, [out, in], where nothing else is said.
    if (hidden_dim == 0) return NeedOption("--hidden", "--seed makes the weights");
    if (call.input.rank() == 0 || call.input.shape().back() == 0) {
      return absl::InvalidArgumentError("--input: expected rows of one value or more, for weights made from a seed");
    }
    call.weights =
        SeededFeedForwardWeights(*common.seed, call.spec, common.dtype, call.input.shape().back(), hidden_dim, biases);
  } else if (!from_file) {
    if (!said.form) return NeedOption("--form", "nothing else tells whether the layer is gated");
    if (!said.activation) return NeedOption("--activation", "nothing else tells the activation");
    if (!said.layout) return NeedOption("--layout", "the axes of a matrix are never guessed");
    if (!said.packing && call.spec.form == FeedForwardForm::kGated) {
      return NeedOption("--packing", "the layer is gated and nothing else tells");
    }
  }
  for (const auto& [role, member] : kFeedForwardRoles) {
    const std::string name(role);
    const auto given = weights.find(name);
    if (given == weights.end()) continue;
    // Typed scales are what scales must be; int8 matrices come from files.
    const DType typed = IsScale(role) ? DType::kFloat16 : common.dtype;
    if (auto status = ReadOptional(FlagOf(name), given->second, typed, call.weights.*member); !status.ok()) {
      return status;
    }
  }
  return call;
}

}  // namespace layerd
