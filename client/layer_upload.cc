#include "client/layer_upload.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/layer_file.h"
#include "client/layer_options.h"
#include "client/layer_text.h"
#include "client/output.h"
#include "client/progress.h"
#include "lib/base/errors.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

constexpr std::string_view kModels = "models/";

// Uploads with a bar that is called `title`.
absl::StatusOr<LayerListing> Upload(RemoteRegistry& registry, const LayerUploadOptions& options,
                                    const std::string& name, const Layer& layer, const std::string& title) {
  ProgressBar bar(title, options.progress);
  UploadOptions upload = options.upload;
  upload.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
  return registry.Upload(name, layer, upload);
}

void Print(const LayerListing& listing) {
  const LayerInfo& info = listing.info;
  std::printf("%s  %s\n%s", info.name.c_str(), info.content_hash.c_str(), QuantizationText(info.outline).c_str());
}

OrderedJson ProblemToJson(const std::string& name, const absl::Status& status) {
  return {{"name", name}, {"reason", DetailsOf(status).reason}, {"message", std::string(status.message())}};
}

// A checkpoint's layers share what is said of them, so only what a checkpoint may leave open can be said.
absl::Status CheckForCheckpoint(const LayerUploadOptions& options, const std::string& name) {
  if (name.rfind(kModels, 0) != 0 || !IsNamePart(name.substr(kModels.size()))) {
    return absl::InvalidArgumentError(absl::StrCat("NAME: expected models/MODEL beside --from, got ", Shortened(name)));
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

}  // namespace

void LayerUploadOptions::Register(CLI::App& command, const std::string& all) {
  auto* weights = command.add_option(
      "--weights", weights_file,
      "a checkpoint (its folder or a safetensors file), with --prefix; or a file of `layers download`");
  command.add_option("--prefix", prefix, "the layer's name in the checkpoint")->needs(weights);
  command.add_option("--from", checkpoint, all);
  RegisterOptions(command, norm);
  RegisterOptions(command, feed_forward);
  command.add_option("--etag", upload.etag, "replace the layer that has this etag (`layers describe --json`)");
  auto* bytes = command.add_option("--chunk-bytes", upload.chunk_bytes, "bytes of a message (1048576)")
                    ->check(CLI::Range(1, 1 << 30));
  command
      .add_option_function<int64_t>(
          "--chunk-kib", [this](int64_t kib) { upload.chunk_bytes = kib << 10; }, "the same in KiB (1024)")
      ->check(CLI::Range(1, 1 << 20))
      ->excludes(bytes);
  command.add_flag("--progress", progress, "show progress, even where no terminal is");
}

absl::Status UnexpectedOption(std::string_view option, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(option), ": expected nothing, ", std::string(why)));
}

absl::StatusOr<Layer> WithSaid(const LayerUploadOptions& options, Layer layer) {
  absl::Status status;
  if (auto* norm = std::get_if<NormalizeLayer>(&layer)) {
    if (AnySaid(options.feed_forward)) {
      status = UnexpectedOption("options of a feed-forward layer", "since it is a norm");
    }
    if (status.ok()) status = PutOver(options.norm, norm->spec);
    if (status.ok() && norm->spec.rounding == NormRounding::kUnspecified) {
      status = NeedOption("--rounding", "a norm that is kept may meet 16-bit input");
    }
  } else {
    if (AnySaid(options.norm)) status = UnexpectedOption("options of a norm", "since it is a feed-forward layer");
    if (status.ok()) status = PutOver(options.feed_forward, std::get<FeedForwardLayer>(layer).spec);
  }
  if (status.ok()) status = CheckLayer(layer).status();
  if (!status.ok()) return status;
  return layer;
}

absl::StatusOr<Layer> ReadLayer(const LayerUploadOptions& options) {
  auto layer = ReadLayer(options.weights_file, options.prefix, HintsOf(options.norm, options.feed_forward));
  if (!layer.ok()) return layer;
  return WithSaid(options, *std::move(layer));
}

int UploadLayer(const Session& session, const LayerUploadOptions& options, const std::string& name,
                const Layer& layer) {
  RemoteRegistry registry(session.RegistryOptions());
  const auto listing = Upload(registry, options, name, layer, name);
  if (!listing.ok()) return FailRemotely(listing.status());
  if (session.json) {
    std::fputs(JsonLine(LayerToJson(*listing)).c_str(), stdout);
  } else {
    Print(*listing);
  }
  return kExitOk;
}

int UploadCheckpoint(const Session& session, const LayerUploadOptions& options, const std::string& name,
                     LayerChange change) {
  if (auto status = CheckForCheckpoint(options, name); !status.ok()) return FailLocally(status);
  const auto checkpoint =
      Checkpoint::Open(options.checkpoint, name.substr(kModels.size()), HintsOf(options.norm, options.feed_forward));
  if (!checkpoint.ok()) return FailLocally(Under("--from", checkpoint.status()));

  RemoteRegistry registry(session.RegistryOptions());
  OrderedJson uploaded = OrderedJson::array(), skipped = OrderedJson::array(), failed = OrderedJson::array();
  int exit_status = kExitOk;
  size_t number = 0;
  for (const auto& record : checkpoint->layers()) {
    const std::string& layer_name = record->info().name;
    ++number;
    if (const absl::Status& status = record->info().status; !status.ok()) {
      std::fprintf(stderr, "layerctl: skipped %s: %s\n", layer_name.c_str(), std::string(status.message()).c_str());
      skipped.push_back(ProblemToJson(layer_name, status));
      continue;
    }
    auto layer = record->Read();
    if (layer.ok()) layer = change(*std::move(layer));
    const auto listing = layer.ok() ? Upload(registry, options, layer_name, *layer,
                                             absl::StrCat(number, "/", checkpoint->layers().size(), " ", layer_name))
                                    : absl::StatusOr<LayerListing>(layer.status());
    if (listing.ok()) {
      uploaded.push_back(LayerToJson(*listing));
      if (!session.json) Print(*listing);
      continue;
    }
    failed.push_back(ProblemToJson(layer_name, listing.status()));
    std::fprintf(stderr, "layerctl: %s was not uploaded:\n", layer_name.c_str());
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

}  // namespace layerd
