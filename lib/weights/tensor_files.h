// The tensors of a checkpoint by name, whichever of its files they lie in.
//
// What is wrong with one file, or with one tensor, is kept with the tensors that it spoils; the others stay good.
#ifndef LAYERD_LIB_WEIGHTS_TENSOR_FILES_H_
#define LAYERD_LIB_WEIGHTS_TENSOR_FILES_H_

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/weights/checkpoint_folder.h"
#include "lib/weights/safetensors.h"

namespace layerd {

struct TensorFile {
  std::string name;
  absl::Status status;                      // why it cannot be used
  std::optional<SafetensorsFile> contents;  // where `status` is OK
};

struct TensorPlace {
  std::shared_ptr<const TensorFile> file;
  // In file->contents; null where the file cannot be used, or lacks the tensor that the index names.
  const SafetensorsEntry* entry = nullptr;
};

// Whether a layer can use `tensor`. FAILED_PRECONDITION, reason LAYER_DAMAGED or, for a dtype that no layer has,
// LAYER_DTYPE; the text names tensor and file.
absl::Status CheckUsable(std::string_view name, const TensorPlace& tensor);

// More tensors of one checkpoint are refused; the largest models have some hundred thousand.
inline constexpr size_t kMaxTensors = size_t{1} << 19;

using TensorMap = std::map<std::string, TensorPlace, std::less<>>;

// The tensors of a folder: those of model.safetensors; where there is none, those that the index names, in the files that
// it names; where there is no index, those of all safetensors files together. The index's file names are input from
// outside (lib/weights/safetensors_index.h). NOT_FOUND where there is nothing; INVALID_ARGUMENT, field "file", where the
// index is damaged, where a file is damaged of which no index tells what it should hold, where two files without an index
// have a tensor of one name, and for more than `max_tensors`.
absl::StatusOr<TensorMap> OpenTensorFiles(const CheckpointFolder& folder, size_t max_tensors = kMaxTensors);

// The tensors of one file; the caller named it, so it may be a link.
absl::StatusOr<TensorMap> OpenTensorFile(const std::string& path);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_TENSOR_FILES_H_
