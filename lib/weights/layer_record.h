// Layers that can be read, and whatever has them: checkpoints and the layer store.
#ifndef LAYERD_LIB_WEIGHTS_LAYER_RECORD_H_
#define LAYERD_LIB_WEIGHTS_LAYER_RECORD_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/layers/layer.h"

namespace layerd {

// An option that was not written down as such, and where it was taken from: {"activation", "silu", "config.json
// hidden_act"}.
struct Inference {
  std::string option;
  std::string value;
  std::string source;
};

// What is known of a layer without reading its weights.
struct LayerInfo {
  std::string name;  // models/{model}/layers/{layer}
  bool uploaded = false;
  Layer outline;                               // options, and each weight's dtype and shape; where `status` is OK
  LayerExtent extent{};                        // where `status` is OK
  std::map<std::string, std::string> tensors;  // role → the tensor's name in its file
  std::vector<Inference> inferred;             // of a checkpoint's layer
  std::string content_hash;    // empty until it is known: always for uploads, from the first use for others
  std::string weights_sha256;  // of an uploaded layer's bytes, as they were sent
  absl::Time create_time = absl::InfinitePast();  // of an uploaded layer
  // Why the layer cannot be used: FAILED_PRECONDITION. It is listed all the same.
  absl::Status status;
};

// One version of a layer. Threads: any.
class LayerRecord {
 public:
  virtual ~LayerRecord() = default;

  virtual const LayerInfo& info() const = 0;

  // Reads the weights, as `info` describes them. info().status where that is not OK; FAILED_PRECONDITION, reason
  // LAYER_DAMAGED, where the files are not what they were, or cannot be read any more; RESOURCE_EXHAUSTED where memory
  // for them cannot be had. Never a mixture of two versions. NOT_FOUND where this version was deleted or replaced before
  // its weights were opened: ask Find() again, which knows what is there now.
  virtual absl::StatusOr<Layer> Read() const = 0;
};

// Threads: any.
class LayerCatalog {
 public:
  virtual ~LayerCatalog() = default;

  // The layer `name` as it is now; as long as it does not change, the same object. NOT_FOUND where there is none.
  virtual absl::StatusOr<std::shared_ptr<const LayerRecord>> Find(std::string_view name) = 0;

  // All layers as they are now, ordered by name.
  virtual std::vector<std::shared_ptr<const LayerRecord>> List() = 0;

  // What is wrong with the catalogue's own files beside single layers, for people: empty, or for example that a model's
  // new files cannot be used and the old ones still answer. `model` is the model's own name.
  virtual std::string WarningOf(std::string_view model) = 0;
};

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_LAYER_RECORD_H_
