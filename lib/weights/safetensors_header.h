// The JSON header of a safetensors file, and the format's names and limits (lib/weights/safetensors.h has the format).
//
// Errors: INVALID_ARGUMENT, field "file", reason SAFETENSORS_…; the text names file and tensor, and what was expected
// and got.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_WEIGHTS_SAFETENSORS_HEADER_H_
#define LAYERD_LIB_WEIGHTS_SAFETENSORS_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/base/dtype.h"
#include "lib/base/shape.h"

namespace layerd {

// The longest JSON header that is read or written, in bytes; the limit of the format's own implementation.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// More dimensions of one tensor are refused. (Those that become a Tensor have at most kMaxRank.)
inline constexpr size_t kMaxSafetensorsRank = 64;

// The header's one key that is no tensor's name.
inline constexpr char kSafetensorsMetadataKey[] = "__metadata__";

struct SafetensorsEntry {
  std::string dtype;  // as the format names it: "F32", "BF16", "I8", …
  Shape shape;
  uint64_t begin = 0;  // bytes from the data's start
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
};

// Parses and checks the JSON header `json` of a file with `data_bytes` bytes of data. `source` stands for the file in
// the texts of errors.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes,
                                                         std::string_view source);

// "F32", "F16" or "BF16".
const char* SafetensorsName(DType dtype);
// The dtype of that name; nothing where layers cannot use it.
std::optional<DType> DTypeOfSafetensorsName(std::string_view name);

// The error that a file is damaged; `reason` follows "SAFETENSORS_".
absl::Status SafetensorsDamaged(std::string_view source, std::string_view reason, const std::string& text);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_SAFETENSORS_HEADER_H_
