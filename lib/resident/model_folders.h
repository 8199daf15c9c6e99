// The models in a folder: each folder in it that holds a checkpoint is a model, named as the folder is.
//
// A thread looks at the folders again and again. A model whose files change is read anew once they have stopped changing
// (two looks that see the same), and taken up whole: every layer of it at once, or not at all, where it cannot be read
// or a layer that could be used before no longer can: the old layers stay, WarningOf() and `on_event` say why, and the
// next change is tried again. What the old layers have not read yet, they read from the old files, which they keep open;
// where those were overwritten in place, reading them is an error. A model whose folder is gone for two looks is gone; one
// whose folder is empty keeps its layers.
//
// Folders with names that models cannot have, and links that lead out of the folder, are no models; `on_event` tells.
// Names that begin with a dot are passed over.
#ifndef LAYERD_LIB_RESIDENT_MODEL_FOLDERS_H_
#define LAYERD_LIB_RESIDENT_MODEL_FOLDERS_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/weights/layer_record.h"

namespace layerd {

// What has happened to a model, for the log. `status` not OK: it could not be read, or is no model.
struct ModelEvent {
  std::string model;  // as the folder is called; empty: all of them, the folder that they are in cannot be read
  absl::Status status;
  bool first = false;  // the first look at it
  bool gone = false;   // its folder is
  int layers = 0;      // that can be used, old ones where the new ones cannot be read
  int unusable_layers = 0;
  std::string family;  // "llama", or how else it was read
};

struct ModelFoldersOptions {
  absl::Duration look_every = absl::Seconds(1);
  std::function<void(const ModelEvent&)> on_event;  // called from the thread; may be null
  // Called from the thread after each look that changed anything, and after the first: whether every model could be
  // read, now or before, and has a layer that can be used, if it has any. May be null.
  std::function<void(bool all_usable)> on_checked;
};

// UNAVAILABLE, reason MODELS_NOT_READ: which layers there are is not known yet.
absl::Status ModelsNotRead();

// Threads: any. Callbacks may come before Open() has returned, and none after the destructor has.
class ModelFolders : public LayerCatalog {
 public:
  // FAILED_PRECONDITION, field "models", where `folder` is no folder that can be read. Returns at once; the thread reads
  // the models.
  static absl::StatusOr<std::unique_ptr<ModelFolders>> Open(const std::string& folder,
                                                            const ModelFoldersOptions& options);
  ~ModelFolders() override;

  // Waits until the first look is over, at most until `deadline`; whether it is.
  bool WaitForFirstLook(absl::Time deadline);
  // Looks once more, now, and waits until that is done. Not from a callback.
  void LookNow();
  // Whether a model of that name is there, usable or not.
  bool HasModel(std::string_view model);

  // ModelsNotRead() for what is not found before the first look is over.
  absl::StatusOr<std::shared_ptr<const LayerRecord>> Find(std::string_view name) override;
  std::vector<std::shared_ptr<const LayerRecord>> List() override;
  std::string WarningOf(std::string_view model) override;

 private:
  struct Impl;
  explicit ModelFolders(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_MODEL_FOLDERS_H_
