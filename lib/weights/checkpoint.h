// Checkpoints as people have them: config.json beside model.safetensors, or beside shards with an index; and one
// safetensors file alone.
//
// Every norm and every dense feed-forward layer in it gets the name of its module ("model.layers.0.mlp", "model.norm").
// The family (config.json's model_type) tells its options: packing, orientation, activation, rounding, offset on γ, ε;
// docs/checkpoints.md has the table. A file layerd.json in the folder describes what no family knows, and goes over it.
// Where there is no config.json, the names of the tensors alone tell what they can, and a layer whose options stay open
// is listed but cannot be used.
//
// No number and no name in the files is trusted; files are opened inside the folder only, links out of it are refused.
// Damage to one file or to one tensor spoils only the layers that need it.
#ifndef LAYERD_LIB_WEIGHTS_CHECKPOINT_H_
#define LAYERD_LIB_WEIGHTS_CHECKPOINT_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "lib/weights/layer_record.h"

namespace layerd {

// What the caller knows better than the files, or in their place.
struct CheckpointHints {
  std::optional<Activation> activation;  // of every feed-forward layer
  std::optional<NormKind> norm_kind;     // of every norm
  std::optional<double> norm_epsilon;
  std::optional<NormRounding> norm_rounding;
};

// The layers of a checkpoint, as its files were when it was opened. Threads: const methods from any number of threads.
class Checkpoint {
 public:
  // `path` is a folder or a safetensors file; the layers are named models/{model}/layers/…. Reads headers, no weights.
  // Errors, field "file": NOT_FOUND; INVALID_ARGUMENT, reason CHECKPOINT_… or SAFETENSORS_…, where config.json,
  // layerd.json, the index, or the only file is damaged, so that nothing could be used.
  static absl::StatusOr<Checkpoint> Open(const std::string& path, const std::string& model,
                                         const CheckpointHints& hints = {});

  // "llama", as config.json's model_type has it; "layerd.json", or "tensor names".
  const std::string& family() const { return family_; }
  // Ordered by name. A layer whose tensors are damaged, or whose options stay open, has that as its info().status.
  const std::vector<std::shared_ptr<const LayerRecord>>& layers() const { return layers_; }
  // By the layer's own name, with or without a dot at its end. NOT_FOUND, reason NO_SUCH_LAYER, field "file", naming some
  // that exist.
  absl::StatusOr<std::shared_ptr<const LayerRecord>> Find(std::string_view layer) const;

 private:
  Checkpoint() = default;
  static absl::StatusOr<Checkpoint> OpenFiles(const std::string& path, const std::string& model,
                                              const CheckpointHints& hints);
  std::string source_;  // stands for the checkpoint in texts
  std::string family_;
  std::vector<std::shared_ptr<const LayerRecord>> layers_;
};

// What tells whether the files of a checkpoint's folder have changed: names, sizes, times and inode numbers of config.json,
// layerd.json, the index and every safetensors file. Empty where the folder holds no checkpoint.
absl::StatusOr<std::string> CheckpointFingerprint(const std::string& folder);

// One line for people: "gated: gate, up, down [out, in]; silu; d 64, h 172; BF16".
std::string Description(const LayerInfo& info);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_CHECKPOINT_H_
