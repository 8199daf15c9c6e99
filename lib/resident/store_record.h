// The records of a layer store: a layer's options and weights as JSON, and where in their file the weights lie.
//
//   {"version": 1, "name": "models/m/layers/l", "normalize": {"kind": "rms_norm", …},
//    "weights": [{"role": "gamma", "dtype": "F32", "shape": [64], "begin": 72, "end": 328, "sha256": "…"}],
//    "sha256": "…", "size_bytes": 328, "content_hash": "…", "create_time": "2025-01-31T12:00:00.000000000Z"}
//
// Version 2 is for layers with int8 weights, and may have a "quantization" (lib/weights/quantization_json.h) too.
//
// A record is not trusted when it is read: unknown keys, numbers out of range, weights that do not fit the options and a
// content hash that is not that of what the record says are damage.
//
// Threads: pure functions; StoreReader as any LayerReader.
#ifndef LAYERD_LIB_RESIDENT_STORE_RECORD_H_
#define LAYERD_LIB_RESIDENT_STORE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/base/dtype.h"
#include "lib/base/shape.h"
#include "lib/layers/layer.h"
#include "lib/resident/store_files.h"
#include "lib/weights/layer_hash.h"
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

// Reads the weights of a layer from their file and compares their SHA-256: Next() is LayerDamaged() at the end of a tensor
// that is not what the record says, naming it. Does not outlive `layer`.
class StoreReader : public LayerReader {
 public:
  // LayerDamaged() for a file of another size.
  static absl::StatusOr<std::unique_ptr<StoreReader>> Open(const StoredLayer& layer, Descriptor file);

  absl::Status Next(std::string_view role, absl::Span<std::byte> out) override;
  absl::Status Finish() override { return absl::OkStatus(); }

 private:
  struct Place {
    const StoredTensor& tensor;
    int64_t at;  // in the file
    Sha256 hash;
  };
  StoreReader(const StoredLayer& layer, Descriptor file);

  const std::string& name_;
  const Descriptor file_;
  std::map<std::string_view, Place> places_;  // by role
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_STORE_RECORD_H_
