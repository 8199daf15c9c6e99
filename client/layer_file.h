// Layers as layerctl takes them from files and puts them into files.
//
// Threads: pure functions of the files.
#ifndef LAYERD_CLIENT_LAYER_FILE_H_
#define LAYERD_CLIENT_LAYER_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/layers/layer.h"
#include "lib/weights/checkpoint.h"

namespace layerd {

// Where a file of one layer has its options, as lib/weights/spec_json.h writes them, in its metadata.
inline constexpr char kSpecKey[] = "layerd.spec";
// Where it has, as lib/weights/quantization_json.h writes it, how far it is from what it was quantised from.
inline constexpr char kQuantizationKey[] = "layerd.quantization";

// The layer `prefix` of the checkpoint at `path`, a folder or a safetensors file. Where `prefix` is empty, the file is one
// that WriteLayerFile() has written. Errors: those of lib/weights/checkpoint.h and lib/weights/safetensors.h; what the
// layer lacks is left to be found by CheckLayer().
absl::StatusOr<Layer> ReadLayer(const std::string& path, const std::string& prefix, const CheckpointHints& hints);

// Writes a safetensors file whose tensors are named by their roles, replacing a file of that name only when all is written.
absl::Status WriteLayerFile(const std::string& path, const Layer& layer);

}  // namespace layerd

#endif  // LAYERD_CLIENT_LAYER_FILE_H_
