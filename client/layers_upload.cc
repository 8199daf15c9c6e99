// layerctl layers upload: one layer from a file or from a seed, or all layers of a checkpoint.
#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/choice_option.h"
#include "client/layer_options.h"
#include "client/layer_upload.h"
#include "client/layers.h"
#include "client/output.h"
#include "client/seed_option.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

constexpr char kExamples[] = R"(examples:
  layerctl layers upload models/mine/layers/mlp --weights model.safetensors --prefix model.layers.0.mlp --activation silu
  layerctl layers upload models/mine/layers/mlp --weights downloaded.safetensors --etag ETAG
  layerctl layers upload models/mine --from CHECKPOINT_DIR
  layerctl layers upload models/mine/layers/seeded --seed 1 --dim 512 --hidden 1365 --dtype bfloat16
  layerctl layers upload models/mine/layers/norm --seed 1 --dim 512 --kind rms_norm --rounding before_gamma)";

struct Options : LayerUploadOptions {
  std::string name;
  std::optional<uint64_t> seed;
  int64_t dim = 0;
  int64_t hidden_dim = 0;  // 0: a norm
  bool biases = false;
  DType dtype = DType::kFloat32;  // of seeded weights
};

absl::StatusOr<Layer> Seeded(const Options& options) {
  if (options.dim == 0) return NeedOption("--dim", "--seed makes the layer");
  if (options.hidden_dim != 0) {
    FeedForwardLayer layer{.spec = SwiGluSpec()};
    if (auto status = PutOver(options.feed_forward, layer.spec); !status.ok()) return status;
    layer.weights = SeededFeedForwardWeights(*options.seed, layer.spec, options.dtype, options.dim, options.hidden_dim,
                                             options.biases);
    return Layer(std::move(layer));
  }
  if (!options.norm.kind) return NeedOption("--hidden or --kind", "--seed makes a feed-forward layer or a norm");
  NormalizeLayer layer;
  layer.weights.gamma = SeededGamma(*options.seed, options.dtype, options.dim);
  if (options.norm.kind == NormKind::kLayerNorm || options.biases) {
    layer.weights.beta = SeededBeta(*options.seed, options.dtype, options.dim);
  }
  return Layer(std::move(layer));
}

// The layer that is to be uploaded, checked.
absl::StatusOr<Layer> LayerOf(const Options& options) {
  if (!options.seed) return ReadLayer(options);
  auto layer = Seeded(options);
  if (!layer.ok()) return layer;
  return WithSaid(options, *std::move(layer));
}

// An option that would be ignored is refused.
absl::Status CheckSources(const Options& options) {
  const int sources = !options.weights_file.empty() + !options.checkpoint.empty() + options.seed.has_value();
  if (sources != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected one source, --weights, --from or --seed, got ", sources == 0 ? "none" : "more"));
  }
  if (!options.checkpoint.empty() && options.upload.etag) {
    return UnexpectedOption("--etag", "since --from uploads more than one layer");
  }
  if (!options.seed && (options.dim != 0 || options.hidden_dim != 0 || options.biases)) {
    return UnexpectedOption("--dim, --hidden, --biases", "since no --seed makes the layer");
  }
  return absl::OkStatus();
}

int Run(const Session& session, const Options& options) {
  if (auto status = CheckSources(options); !status.ok()) return FailLocally(status);
  if (!options.checkpoint.empty()) {
    return UploadCheckpoint(session, options, options.name, [](Layer layer) { return layer; });
  }
  const auto layer = LayerOf(options);
  if (!layer.ok()) return FailLocally(layer.status());
  return UploadLayer(session, options, options.name, *layer);
}

}  // namespace

void RegisterLayersUpload(CLI::App& layers, Actions& actions) {
  const auto options = std::make_shared<Options>();
  auto* command = layers.add_subcommand("upload", "a layer, or all of a checkpoint, into the server's store");
  command->footer(kExamples);
  command->add_option("NAME", options->name, "models/MODEL/layers/LAYER; with --from models/MODEL")->required();
  options->Register(*command, "a checkpoint, of which every layer that can be used is uploaded");
  auto* seed = command->add_option("--seed", options->seed, "make the layer from this seed (docs/seeded.md)")
                   ->check(SeedOf<uint64_t>());
  command->add_option("--dim", options->dim, "its width")->check(CLI::Range(1, 1 << 20));
  command->add_option("--hidden", options->hidden_dim, "its hidden width")->check(CLI::Range(1, 1 << 20));
  command->add_flag("--biases", options->biases, "with biases; a norm, with β");
  AddChoice(*command, "--dtype", options->dtype, kDTypeNames, "dtype of seeded weights (float32)")->needs(seed);
  actions[command] = {.run = [options](const Session& session) { return Run(session, *options); }};
}

}  // namespace layerd
