// What callers may do with resident layers beside calling them: look, upload, delete. Every face goes through it.
#ifndef LAYERD_LIB_RESIDENT_LAYER_REGISTRY_H_
#define LAYERD_LIB_RESIDENT_LAYER_REGISTRY_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/resident/layer_library.h"
#include "lib/resident/layer_store.h"
#include "lib/resident/model_folders.h"

namespace layerd {

// Threads: any. All it is made of must outlive it.
class LayerRegistry {
 public:
  // `store` null: layers cannot be uploaded. `models` null: there are no checkpoints.
  LayerRegistry(LayerLibrary& library, LayerStore* store, ModelFolders* models)
      : library_(library), store_(store), models_(models) {}

  LayerLibrary& library() { return library_; }

  // As LayerStore has them; further, FAILED_PRECONDITION: reason NO_LAYER_STORE where there is no store (--layer_store),
  // reason READ_ONLY, where the model is a checkpoint, which callers cannot change; ModelsNotRead().
  absl::StatusOr<std::unique_ptr<LayerStore::Upload>> BeginUpload(const UploadHeader& header);
  absl::Status Delete(std::string_view name, const std::optional<std::string>& etag);

 private:
  absl::Status CheckChangeable(std::string_view field, std::string_view name);

  LayerLibrary& library_;
  LayerStore* const store_;
  ModelFolders* const models_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_REGISTRY_H_
