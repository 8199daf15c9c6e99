// The layers that live on this server, as its flags say: checkpoints, the layer store, and the memory for them.
#ifndef LAYERD_SERVER_RESIDENT_LAYERS_H_
#define LAYERD_SERVER_RESIDENT_LAYERS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "lib/resident/layer_library.h"
#include "lib/resident/layer_registry.h"
#include "lib/resident/layer_store.h"
#include "lib/resident/model_folders.h"

namespace layerd {

struct ResidentLayersOptions {
  std::string models;       // folder of checkpoints; empty: none
  std::string layer_store;  // folder of uploads; empty: none
  int64_t layer_store_bytes = int64_t{64} << 30;
  LayerLibraryOptions library;
};

// Threads: construction and destruction from one thread; the rest from any.
class ResidentLayers {
 public:
  // FAILED_PRECONDITION, naming the flag, for a folder that cannot be used. Models are read by a thread of their own;
  // what cannot be read is logged, and tried again when it changes.
  static absl::StatusOr<std::unique_ptr<ResidentLayers>> Open(const ResidentLayersOptions& options);
  ~ResidentLayers();

  // Calls `on_ready` once: when every model could be read, or now, where that is so already or there is none.
  void WhenReady(std::function<void()> on_ready);

  LayerSource& source() { return *library_; }
  LayerRegistry& registry() { return *registry_; }

 private:
  ResidentLayers() = default;
  void OnModel(const ModelEvent& event);
  void OnChecked(bool all_usable);

  // The models' thread may look before the library is there, and must not after it is gone.
  std::mutex mutex_;
  LayerLibrary* to_preload_ = nullptr;  // guarded by mutex_
  bool ready_ = true;                   // guarded by mutex_
  std::function<void()> on_ready_;      // guarded by mutex_

  std::unique_ptr<LayerStore> store_;
  std::unique_ptr<ModelFolders> models_;
  std::unique_ptr<LayerLibrary> library_;
  std::unique_ptr<LayerRegistry> registry_;
};

}  // namespace layerd

#endif  // LAYERD_SERVER_RESIDENT_LAYERS_H_
