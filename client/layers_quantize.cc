// layerctl layers quantize: a feed-forward layer with int8 matrices made of one of the server or of a file, or all of a
// checkpoint.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/layer_file.h"
#include "client/layer_options.h"
#include "client/layer_text.h"
#include "client/layer_upload.h"
#include "client/layers.h"
#include "client/output.h"
#include "client/progress.h"
#include "client/seed_option.h"
#include "lib/base/errors.h"
#include "lib/base/parallel.h"
#include "lib/layers/quantize.h"
#include "lib/weights/layer_hash.h"

namespace layerd {
namespace {

constexpr char kExamples[] = R"(examples:
  layerctl layers quantize models/mine/layers/mlp-int8 --layer models/mine/layers/mlp
  layerctl layers quantize models/mine-int8 --from CHECKPOINT_DIR
  layerctl layers quantize --weights CHECKPOINT_DIR --prefix model.layers.0.mlp --out mlp_int8.safetensors

Matrices become int8, symmetric, with a float16 scale for each output and 32 of its inputs; all else stays. What is printed,
and told by `layers describe`, is the error against the layer that was quantised: of each matrix's weights, and of the output
on random rows. With --from, norms are uploaded as they are.)";

struct Options : LayerUploadOptions {
  std::string name;   // empty: --out
  std::string layer;  // of the server
  QuantizationProbe probe;
};

absl::Status CheckOptions(const Options& options, const std::string& out) {
  const int sources = !options.layer.empty() + !options.weights_file.empty() + !options.checkpoint.empty();
  if (sources != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected one source, --layer, --weights or --from, got ", sources == 0 ? "none" : "more"));
  }
  if (!options.layer.empty() && (AnySaid(options.norm) || AnySaid(options.feed_forward))) {
    return UnexpectedOption("options of a layer", "since --layer has its own");
  }
  if (options.name.empty() == out.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected either the NAME to upload to, or --out, got ", out.empty() ? "neither" : "both"));
  }
  if (!out.empty()) {
    if (!options.checkpoint.empty()) return UnexpectedOption("--out", "since --from makes more than one layer");
    if (options.upload.etag) return UnexpectedOption("--etag", "since nothing is uploaded");
    if (!absl::EndsWith(out, ".safetensors")) {
      return absl::InvalidArgumentError(absl::StrCat("--out: expected FILE.safetensors, got ", Shortened(out)));
    }
  }
  if (!options.checkpoint.empty() && options.upload.etag) {
    return UnexpectedOption("--etag", "since --from uploads more than one layer");
  }
  return absl::OkStatus();
}

// `layer` quantised; `hash` is its content hash.
absl::StatusOr<Layer> Quantized(const Options& options, const Layer& layer, const std::string& hash) {
  const auto* feed_forward = std::get_if<FeedForwardLayer>(&layer);
  if (feed_forward == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.layer.empty() ? "--weights: " : absl::StrCat("--layer: ", Shortened(options.layer), ": "),
                     "expected a feed-forward layer, got a norm"));
  }
  try {
    auto quantized = Quantize(Arena(AvailableCpus()), *feed_forward, hash, options.probe);
    if (!quantized.ok()) return quantized.status();
    return Layer(*std::move(quantized));
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory for the quantised layer");
  }
}

int WriteFile(const Session& session, const Layer& layer) {
  if (auto status = WriteLayerFile(session.out, layer); !status.ok()) return FailLocally(status);
  const std::string hash = ContentHash(layer);
  if (session.json) {
    const Quantization& quantization = *std::get<FeedForwardLayer>(layer).quantization;
    const OrderedJson json = {{"file", session.out},
                              {"content_hash", hash},
                              {"weight_bytes", CheckLayer(layer)->weight_bytes},
                              {"quantization", QuantizationInOrder(quantization)}};
    std::fputs(JsonLine(json).c_str(), stdout);
  } else {
    std::printf("%s  %s\n%s", session.out.c_str(), hash.c_str(), QuantizationText(layer).c_str());
  }
  return kExitOk;
}

absl::StatusOr<DownloadedLayer> Download(const Session& session, const Options& options) {
  RemoteRegistry registry(session.RegistryOptions());
  ProgressBar bar(options.layer, options.progress);
  return registry.Download(options.layer, [&bar](int64_t done, int64_t total) { bar.Update(done, total); });
}

int Run(const Session& session, const Options& options) {
  if (auto status = CheckOptions(options, session.out); !status.ok()) return FailLocally(status);
  if (!options.checkpoint.empty()) {
    return UploadCheckpoint(session, options, options.name, [&options](Layer layer) -> absl::StatusOr<Layer> {
      if (std::holds_alternative<NormalizeLayer>(layer)) return layer;
      return Quantized(options, layer, ContentHash(layer));
    });
  }
  absl::StatusOr<Layer> quantized;
  if (!options.layer.empty()) {
    const auto source = Download(session, options);
    if (!source.ok()) return FailRemotely(source.status());
    quantized = Quantized(options, source->layer, source->content_hash);
  } else {
    const auto source = ReadLayer(options);
    if (!source.ok()) return FailLocally(source.status());
    quantized = Quantized(options, *source, ContentHash(*source));
  }
  if (!quantized.ok()) return FailLocally(quantized.status());
  if (!session.out.empty()) return WriteFile(session, *quantized);
  return UploadLayer(session, options, options.name, *quantized);
}

}  // namespace

void RegisterLayersQuantize(CLI::App& layers, Actions& actions) {
  const auto options = std::make_shared<Options>();
  auto* command = layers.add_subcommand("quantize", "int8 layers made of others, and how far they are from them");
  command->footer(kExamples);
  command->add_option("NAME", options->name,
                      "upload to models/MODEL/layers/LAYER; with --from to models/MODEL; or write --out");
  command->add_option("--layer", options->layer, "quantise this layer of the server, models/MODEL/layers/LAYER");
  options->Register(*command, "a checkpoint, of which every layer that can be used is uploaded");
  command->add_option("--seed", options->probe.seed, "of the rows by which the output is judged (1)")
      ->check(SeedOf<int64_t>());
  command->add_option("--rows", options->probe.rows, "how many (16)")->check(CLI::Range(1, 1 << 16));
  actions[command] = {.run = [options](const Session& session) { return Run(session, *options); }, .writes_out = true};
}

}  // namespace layerd
