// The index of a checkpoint in several files, model.safetensors.index.json: {"metadata": …, "weight_map": {tensor: file}}.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_WEIGHTS_SAFETENSORS_INDEX_H_
#define LAYERD_LIB_WEIGHTS_SAFETENSORS_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace layerd {

inline constexpr uint64_t kMaxSafetensorsIndexBytes = uint64_t{32} << 20;
inline constexpr size_t kMaxSafetensorsFiles = 4096;

struct SafetensorsIndex {
  std::vector<std::string> files;                      // each once
  std::map<std::string, size_t, std::less<>> tensors;  // name → its place in `files`
};

// Parses an index, whose files must be named as IsSafetensorsName() says. Keys beside weight_map are not looked at.
// INVALID_ARGUMENT, field "file", reason CHECKPOINT_INDEX. `source` stands for the file in the text.
absl::StatusOr<SafetensorsIndex> ParseSafetensorsIndex(std::string_view json, std::string_view source);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_SAFETENSORS_INDEX_H_
