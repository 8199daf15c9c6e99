#include "server/resident_layers.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/log.h"

namespace layerd {
namespace {

absl::Status FlagError(const std::string& flag, const absl::Status& status) {
  absl::string_view text = status.message();
  absl::ConsumePrefix(&text, absl::StrCat(flag, ": "));
  return absl::FailedPreconditionError(absl::StrCat("--", flag, ": ", text));
}

void LogModel(const ModelEvent& event) {
  if (event.gone) {
    Log(LogLevel::kInfo, "model_gone", {{"model", event.model}});
  } else if (!event.status.ok()) {
    Log(LogLevel::kError, "model_unusable",
        {{"model", event.model},
         {"error", std::string(event.status.message())},
         {"effect", event.first ? "it has no layers, and this server is not ready" : "its old layers stay"}});
  } else {
    Log(event.unusable_layers > 0 ? LogLevel::kWarning : LogLevel::kInfo, event.first ? "model_read" : "model_changed",
        {{"model", event.model},
         {"family", event.family},
         {"layers", absl::StrCat(event.layers)},
         {"unusable_layers", absl::StrCat(event.unusable_layers)}});
  }
}

void LogPreparation(const PreparationEvent& event) {
  if (!event.status.ok()) {
    // Too large, or no room now: the call is told, and nothing is wrong here.
    const bool full = event.status.code() == absl::StatusCode::kResourceExhausted;
    LogSeldom(full ? LogLevel::kInfo : LogLevel::kError, "layer_not_prepared", event.name,
              std::string(event.status.message()));
    return;
  }
  // Where layers take turns in memory, calls prepare them again and again.
  Log(event.ahead ? LogLevel::kInfo : LogLevel::kDebug, "layer_prepared",
      {{"layer", event.name}, {"bytes", absl::StrCat(event.bytes)}, {"took", absl::FormatDuration(event.took)}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<ResidentLayers>> ResidentLayers::Open(const ResidentLayersOptions& options) {
  std::unique_ptr<ResidentLayers> layers(new ResidentLayers);
  std::vector<LayerCatalog*> catalogs;
  // First, since the thread of the models looks at it.
  if (!options.layer_store.empty()) {
    auto store = LayerStore::Open(options.layer_store, {.max_bytes = options.layer_store_bytes});
    if (!store.ok()) return FlagError("layer_store", store.status());
    layers->store_ = *std::move(store);
  }
  if (!options.models.empty()) {
    layers->ready_ = false;
    ModelFoldersOptions model_options;
    model_options.on_event = [self = layers.get()](const ModelEvent& event) { self->OnModel(event); };
    model_options.on_checked = [self = layers.get()](bool all_usable) { self->OnChecked(all_usable); };
    auto models = ModelFolders::Open(options.models, model_options);
    if (!models.ok()) return FlagError("models", models.status());
    layers->models_ = *std::move(models);
    catalogs.push_back(layers->models_.get());
  }
  if (layers->store_) catalogs.push_back(layers->store_.get());
  LayerLibraryOptions library_options = options.library;
  library_options.on_event = LogPreparation;
  layers->library_ = std::make_unique<LayerLibrary>(catalogs, library_options);
  layers->registry_ = std::make_unique<LayerRegistry>(*layers->library_, layers->store_.get(), layers->models_.get());
  layers->library_->Preload();
  std::lock_guard<std::mutex> lock(layers->mutex_);
  layers->to_preload_ = layers->library_.get();
  return layers;
}

ResidentLayers::~ResidentLayers() {
  std::lock_guard<std::mutex> lock(mutex_);
  to_preload_ = nullptr;
}

void ResidentLayers::OnModel(const ModelEvent& event) {
  LogModel(event);
  if (store_ == nullptr || event.gone) return;
  const std::string prefix = absl::StrCat("models/", event.model, "/");
  for (const auto& record : store_->List()) {
    if (record->info().name.rfind(prefix, 0) != 0) continue;
    Log(LogLevel::kWarning, "uploads_hidden",
        {{"model", event.model},
         {"reason", "a checkpoint in --models has this name; uploads of it cannot be changed"}});
    return;
  }
}

void ResidentLayers::OnChecked(bool all_usable) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (to_preload_ != nullptr) to_preload_->Preload();
  if (ready_ || !all_usable) return;
  ready_ = true;
  if (on_ready_) on_ready_();
}

void ResidentLayers::WhenReady(std::function<void()> on_ready) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ready_) {
    on_ready();
  } else {
    on_ready_ = std::move(on_ready);
  }
}

}  // namespace layerd
