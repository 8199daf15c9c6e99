// The records of a layer store: a layer's options and weights as JSON, and where in their file the weights lie.
//
//   {"version": 1, "name": "models/m/layers/l", "normalize": {"kind": "rms_norm", …},
//    "weights": [{"role": "gamma", "dtype": "F32", "shape": [64], "begin": 72, "end": 328, "sha256": "…"}],
//    "sha256": "…", "size_bytes": 328, "content_hash": "…", "create_time": "2025-01-31T12:00:00.000000000Z"}
//
// A record is not trusted when it is read: unknown keys, numbers out of range, weights that do not fit the options and a
// content hash that is not that of what the record says are damage.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_RESIDENT_STORE_RECORD_H_
#define LAYERD_LIB_RESIDENT_STORE_RECORD_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/base/dtype.h"
#include "lib/base/shape.h"
#include "lib/layers/layer.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/layer_record.h"

namespace layerd {

struct StoredTensor {
  std::string role;
  DType dtype = DType::kFloat32;
  Shape shape;
  int64_t begin = 0;  // bytes from the start of the file of weights
  int64_t end = 0;
  std::string sha256;  // of those bytes
};

struct StoredLayer {
  LayerInfo info;
  int64_t size_bytes = 0;  // of the file of weights, whose SHA-256 is info.weights_sha256
  std::vector<StoredTensor> tensors;
};

// FAILED_PRECONDITION, reason LAYER_DAMAGED, about the layer `name`.
absl::Status LayerDamaged(std::string_view name, std::string_view text);

// Fills what follows from info.outline's options, the tensors and their hashes: the outline's weights, extent, names of
// the tensors and content hash. INVALID_ARGUMENT, field "weights.…" or "spec.…", where they make no layer.
absl::Status Complete(StoredLayer& layer);

// The record of a layer that is complete.
std::string RecordText(const StoredLayer& layer);

// The layer `name` as its record tells; where that is damaged, info.status says how, and only the name is known.
StoredLayer ParseRecord(const LayerName& name, std::string_view text);

// Reads all weights from the open file `descriptor` and compares their SHA-256. LayerDamaged() where they are not what
// the record says, naming the tensor. std::bad_alloc where memory cannot be had.
absl::StatusOr<Layer> ReadWeights(const StoredLayer& layer, int descriptor);

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_STORE_RECORD_H_
