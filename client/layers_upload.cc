// layerctl layers upload: one layer from a file or from a seed, or all layers of a checkpoint.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/choice_option.h"
#include "client/layer_file.h"
#include "client/layer_options.h"
#include "client/layer_text.h"
#include "client/layers.h"
#include "client/output.h"
#include "client/progress.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

constexpr char kExamples[] = R"(examples:
  layerctl layers upload models/mine/layers/mlp --weights model.safetensors --prefix model.layers.0.mlp --activation silu
  layerctl layers upload models/mine/layers/mlp --weights downloaded.safetensors --etag ETAG
  layerctl layers upload models/mine --from CHECKPOINT_DIR
  layerctl layers upload models/mine/layers/seeded --seed 1 --dim 512 --hidden 1365 --dtype bfloat16
  layerctl layers upload models/mine/layers/norm --seed 1 --dim 512 --kind rms_norm --rounding before_gamma)";

struct Options {
  std::string name;
  std::string weights_file, prefix;  // one layer of a checkpoint, or a file of one layer
  std::string checkpoint;            // all of its layers
  std::optional<uint64_t> seed;
  int64_t dim = 0;
  int64_t hidden_dim = 0;  // 0: a norm
  bool biases = false;
  DType dtype = DType::kFloat32;  // of seeded weights
  NormalizeSaid norm;
  FeedForwardSaid feed_forward;
  UploadOptions upload;
  bool progress = false;
};

absl::Status Unexpected(std::string_view what, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(what), ": expected nothing, ", std::string(why)));
}

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
  auto layer = options.seed
                   ? Seeded(options)
                   : ReadLayer(options.weights_file, options.prefix, HintsOf(options.norm, options.feed_forward));
  if (!layer.ok()) return layer;
  absl::Status status;
  if (auto* norm = std::get_if<NormalizeLayer>(&*layer)) {
    if (AnySaid(options.feed_forward)) status = Unexpected("options of a feed-forward layer", "since it is a norm");
    if (status.ok()) status = PutOver(options.norm, norm->spec);
    if (status.ok() && norm->spec.rounding == NormRounding::kUnspecified) {
      status = NeedOption("--rounding", "a norm that is kept may meet 16-bit input");
    }
  } else {
    if (AnySaid(options.norm)) status = Unexpected("options of a norm", "since it is a feed-forward layer");
    if (status.ok()) status = PutOver(options.feed_forward, std::get<FeedForwardLayer>(*layer).spec);
  }
  if (status.ok()) status = CheckLayer(*layer).status();
  if (!status.ok()) return status;
  return layer;
}

// Uploads with a bar that is called `title`.
absl::StatusOr<LayerListing> Upload(RemoteRegistry& registry, const std::string& name, const Layer& layer,
                                    const Options& options, const std::string& title) {
  ProgressBar bar(title, options.progress);
  UploadOptions upload = options.upload;
  upload.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
  return registry.Upload(name, layer, upload);
}

void Print(const LayerListing& listing) {
  std::printf("%s  %s\n", listing.info.name.c_str(), listing.info.content_hash.c_str());
}

int UploadOne(const Session& session, const Options& options) {
  const auto layer = LayerOf(options);
  if (!layer.ok()) return FailLocally(layer.status());
  RemoteRegistry registry(session.RegistryOptions());
  const auto listing = Upload(registry, options.name, *layer, options, options.name);
  if (!listing.ok()) return FailRemotely(listing.status());
  if (session.json) {
    std::fputs(JsonLine(LayerToJson(*listing)).c_str(), stdout);
  } else {
    Print(*listing);
  }
  return kExitOk;
}

OrderedJson ProblemToJson(const std::string& name, const absl::Status& status) {
  return {{"name", name}, {"reason", DetailsOf(status).reason}, {"message", std::string(status.message())}};
}

constexpr std::string_view kModels = "models/";

// A checkpoint's layers share what is said of them, so only what a checkpoint may leave open can be said.
absl::Status CheckForCheckpoint(const Options& options) {
  if (options.name.rfind(kModels, 0) != 0 || !IsNamePart(options.name.substr(kModels.size()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("NAME: expected models/MODEL beside --from, got ", Shortened(options.name)));
  }
  NormalizeSaid norm = options.norm;
  norm.kind.reset();
  norm.epsilon.reset();
  norm.rounding.reset();
  FeedForwardSaid feed_forward = options.feed_forward;
  feed_forward.activation.reset();
  if (!AnySaid(norm) && !AnySaid(feed_forward)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--from: expected no options of a layer but --activation, --kind, --eps and --rounding, which hold for all");
}

// Uploads what can be used of a checkpoint; the rest is told on standard error. Goes on after a layer that is refused, but
// not without a connection.
int UploadCheckpoint(const Session& session, const Options& options) {
  if (auto status = CheckForCheckpoint(options); !status.ok()) return FailLocally(status);
  const auto checkpoint = Checkpoint::Open(options.checkpoint, options.name.substr(kModels.size()),
                                           HintsOf(options.norm, options.feed_forward));
  if (!checkpoint.ok()) return FailLocally(Under("--from", checkpoint.status()));

  RemoteRegistry registry(session.RegistryOptions());
  OrderedJson uploaded = OrderedJson::array(), skipped = OrderedJson::array(), failed = OrderedJson::array();
  int exit_status = kExitOk;
  size_t number = 0;
  for (const auto& record : checkpoint->layers()) {
    const std::string& name = record->info().name;
    ++number;
    if (const absl::Status& status = record->info().status; !status.ok()) {
      std::fprintf(stderr, "layerctl: skipped %s: %s\n", name.c_str(), std::string(status.message()).c_str());
      skipped.push_back(ProblemToJson(name, status));
      continue;
    }
    const auto layer = record->Read();
    const auto listing = layer.ok() ? Upload(registry, name, *layer, options,
                                             absl::StrCat(number, "/", checkpoint->layers().size(), " ", name))
                                    : absl::StatusOr<LayerListing>(layer.status());
    if (listing.ok()) {
      uploaded.push_back(LayerToJson(*listing));
      if (!session.json) Print(*listing);
      continue;
    }
    failed.push_back(ProblemToJson(name, listing.status()));
    std::fprintf(stderr, "layerctl: %s was not uploaded:\n", name.c_str());
    exit_status = layer.ok() ? FailRemotely(listing.status()) : FailLocally(listing.status());
    if (exit_status == kExitNoConnection) break;
  }
  if (session.json) {
    std::fputs(JsonLine({{"layers", uploaded}, {"skipped", skipped}, {"failed", failed}}).c_str(), stdout);
  }
  if (uploaded.empty() && exit_status == kExitOk) {
    return FailLocally(absl::NotFoundError("--from: the checkpoint has no layer that can be used"));
  }
  return exit_status;
}

// An option that would be ignored is refused.
absl::Status CheckSources(const Options& options) {
  const int sources = !options.weights_file.empty() + !options.checkpoint.empty() + options.seed.has_value();
  if (sources != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected one source, --weights, --from or --seed, got ", sources == 0 ? "none" : "more"));
  }
  if (!options.checkpoint.empty() && options.upload.etag) {
    return Unexpected("--etag", "since --from uploads more than one layer");
  }
  if (!options.seed && (options.dim != 0 || options.hidden_dim != 0 || options.biases)) {
    return Unexpected("--dim, --hidden, --biases", "since no --seed makes the layer");
  }
  return absl::OkStatus();
}

int Run(const Session& session, const Options& options) {
  if (auto status = CheckSources(options); !status.ok()) return FailLocally(status);
  return options.checkpoint.empty() ? UploadOne(session, options) : UploadCheckpoint(session, options);
}

}  // namespace

void RegisterLayersUpload(CLI::App& layers, Actions& actions) {
  const auto options = std::make_shared<Options>();
  auto* command = layers.add_subcommand("upload", "a layer, or all of a checkpoint, into the server's store");
  command->footer(kExamples);
  command->add_option("NAME", options->name, "models/MODEL/layers/LAYER; with --from models/MODEL")->required();
  auto* weights = command->add_option(
      "--weights", options->weights_file,
      "a checkpoint (its folder or a safetensors file), with --prefix; or a file of `layers download`");
  command->add_option("--prefix", options->prefix, "the layer's name in the checkpoint")->needs(weights);
  command->add_option("--from", options->checkpoint, "a checkpoint, of which every layer that can be used is uploaded");
  auto* seed = command->add_option("--seed", options->seed, "make the layer from this seed (docs/seeded.md)")
                   ->check(CLI::NonNegativeNumber);
  command->add_option("--dim", options->dim, "its width")->check(CLI::Range(1, 1 << 20));
  command->add_option("--hidden", options->hidden_dim, "its hidden width")->check(CLI::Range(1, 1 << 20));
  command->add_flag("--biases", options->biases, "with biases; a norm, with β");
  AddChoice(*command, "--dtype", options->dtype, kDTypeNames, "dtype of seeded weights (float32)")->needs(seed);
  RegisterOptions(*command, options->norm);
  RegisterOptions(*command, options->feed_forward);
  command->add_option("--etag", options->upload.etag,
                      "replace the layer that has this etag (`layers describe --json`)");
  auto* bytes = command->add_option("--chunk-bytes", options->upload.chunk_bytes, "bytes of a message (1048576)")
                    ->check(CLI::Range(1, 1 << 30));
  command
      ->add_option_function<int64_t>(
          "--chunk-kib", [options](int64_t kib) { options->upload.chunk_bytes = kib << 10; }, "the same in KiB (1024)")
      ->check(CLI::Range(1, 1 << 20))
      ->excludes(bytes);
  command->add_flag("--progress", options->progress, "show progress, even where no terminal is");
  actions[command] = {.run = [options](const Session& session) { return Run(session, *options); }};
}

}  // namespace layerd
