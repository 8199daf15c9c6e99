// layerctl layers list, describe, download and delete.
#include "client/layers.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/layer_file.h"
#include "client/layer_options.h"
#include "client/layer_text.h"
#include "client/output.h"
#include "client/progress.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

int List(const Session& session, const LayerQuery& query) {
  RemoteRegistry registry(session.RegistryOptions());
  const auto layers = registry.ListAll(query);
  if (!layers.ok()) return FailRemotely(layers.status());
  if (session.json) {
    OrderedJson json = {{"layers", OrderedJson::array()}};
    for (const LayerListing& listing : *layers) json["layers"].push_back(LayerToJson(listing));
    std::fputs(JsonLine(json).c_str(), stdout);
  } else {
    std::fputs(LayerTable(*layers).c_str(), stdout);
  }
  return kExitOk;
}

int Describe(const Session& session, const std::string& name) {
  RemoteRegistry registry(session.RegistryOptions());
  const auto listing = registry.Get(name);
  if (!listing.ok()) return FailRemotely(listing.status());
  std::fputs((session.json ? JsonLine(LayerToJson(*listing)) : LayerDescription(*listing)).c_str(), stdout);
  return kExitOk;
}

int Download(const Session& session, const std::string& name, bool progress) {
  if (session.out.empty()) return FailLocally(NeedOption("--out", "the layer is to be written to a file"));
  if (!absl::EndsWith(session.out, ".safetensors")) {
    return FailLocally(
        absl::InvalidArgumentError(absl::StrCat("--out: expected FILE.safetensors, got ", Shortened(session.out))));
  }
  RemoteRegistry registry(session.RegistryOptions());
  absl::StatusOr<DownloadedLayer> layer;
  {
    ProgressBar bar(name, progress);
    layer = registry.Download(name, [&bar](int64_t done, int64_t total) { bar.Update(done, total); });
  }
  if (!layer.ok()) return FailRemotely(layer.status());
  if (auto status = WriteLayerFile(session.out, layer->layer); !status.ok()) return FailLocally(status);
  if (session.json) {
    const OrderedJson json = {{"name", name}, {"content_hash", layer->content_hash}, {"file", session.out}};
    std::fputs(JsonLine(json).c_str(), stdout);
  } else {
    std::printf("%s  %s\n", name.c_str(), layer->content_hash.c_str());
  }
  return kExitOk;
}

int Delete(const Session& session, const std::string& name, const std::optional<std::string>& etag) {
  RemoteRegistry registry(session.RegistryOptions());
  if (auto status = registry.Delete(name, etag); !status.ok()) return FailRemotely(status);
  if (session.json) {
    std::fputs(JsonLine({{"deleted", name}}).c_str(), stdout);
  } else {
    std::printf("deleted %s\n", name.c_str());
  }
  return kExitOk;
}

}  // namespace

void RegisterLayersList(CLI::App& layers, Actions& actions) {
  const auto query = std::make_shared<LayerQuery>();
  auto* command = layers.add_subcommand("list", "all layers, ordered by name");
  command->footer(
      "examples:\n  layerctl layers list\n  layerctl layers list --model stories260k --filter 'state:usable *.mlp'");
  command->add_option("--model", query->model, "of this model only");
  command->add_option("--filter", query->filter,
                      "terms that all must hold: kind:normalize, kind:feed_forward, source:checkpoint, source:upload, "
                      "state:usable, state:unusable, state:prepared, or a pattern such as '*.mlp'");
  actions[command] = {.run = [query](const Session& session) { return List(session, *query); }};
}

void RegisterLayersDescribe(CLI::App& layers, Actions& actions) {
  const auto name = std::make_shared<std::string>();
  auto* command = layers.add_subcommand("describe", "all that is known of a layer, and what it was inferred from");
  command->footer("examples:\n  layerctl layers describe models/stories260k/layers/model.layers.0.mlp");
  command->add_option("NAME", *name, "models/MODEL/layers/LAYER")->required();
  actions[command] = {.run = [name](const Session& session) { return Describe(session, *name); }};
}

void RegisterLayersDownload(CLI::App& layers, Actions& actions) {
  const auto name = std::make_shared<std::string>();
  const auto progress = std::make_shared<bool>(false);
  auto* command = layers.add_subcommand("download", "a layer into a safetensors file (--out)");
  command->footer(
      "examples:\n  layerctl layers download models/stories260k/layers/model.norm --out norm.safetensors\n\n"
      "Tensors are named by their roles; the options are in the metadata, as \"layerd.spec\", where `layers upload`,\n"
      "`normalize` and `feedforward` find them.");
  command->add_option("NAME", *name, "models/MODEL/layers/LAYER")->required();
  command->add_flag("--progress", *progress, "show progress, even where no terminal is");
  actions[command] = {.run = [name, progress](const Session& session) { return Download(session, *name, *progress); },
                      .writes_out = true};
}

void RegisterLayersDelete(CLI::App& layers, Actions& actions) {
  const auto name = std::make_shared<std::string>();
  const auto etag = std::make_shared<std::optional<std::string>>();
  auto* command = layers.add_subcommand("delete", "an uploaded layer; calls under way finish with it");
  command->footer("examples:\n  layerctl layers delete models/mine/layers/mlp");
  command->add_option("NAME", *name, "models/MODEL/layers/LAYER")->required();
  command->add_option("--etag", *etag, "only if this still is its etag (`layers describe --json`)");
  actions[command] = {.run = [name, etag](const Session& session) { return Delete(session, *name, *etag); }};
}

void RegisterLayers(CLI::App& app, Actions& actions) {
  auto* layers = app.add_subcommand("layers", "the layers that live on the server");
  layers->footer(
      "examples:\n  layerctl layers list\n"
      "  layerctl layers upload models/mine/layers/mlp --weights model.safetensors --prefix model.layers.0.mlp "
      "--activation silu\n"
      "  layerctl layers verify models/mine/layers/mlp");
  layers->require_subcommand(1);
  for (const auto add : {RegisterLayersList, RegisterLayersDescribe, RegisterLayersUpload, RegisterLayersQuantize,
                         RegisterLayersDownload, RegisterLayersDelete, RegisterLayersVerify}) {
    add(*layers, actions);
  }
}

}  // namespace layerd
