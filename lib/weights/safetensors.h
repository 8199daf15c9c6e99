// Safetensors files: a strict reader that trusts no number of the file, and a writer.
//
// The format (github.com/huggingface/safetensors): 8 bytes little-endian header length N, N bytes of JSON, then data.
// The JSON is an object that begins at its first byte and may be padded with spaces; each entry is {"dtype", "shape",
// "data_offsets": [begin, end)} relative to the data's start; "__metadata__" maps string to string. The tensors lie
// side by side: no holes, no overlaps, the last end is the data's length. Row-major, little-endian, not necessarily
// aligned; tensors of no dimensions and of no elements are legal.
//
// Everything else is refused when the file is opened: other or double keys, other types, fractional, negative or huge
// numbers, dtypes that the format does not have, shapes that do not fit their bytes. A dtype of the format that layers
// cannot use is an error only when that tensor is read.
//
// Errors of a damaged file: INVALID_ARGUMENT, field "file", reason SAFETENSORS_…; the text names file and tensor, and
// what was expected and got. Those of the file system: lib/weights/file_io.h.
#ifndef LAYERD_LIB_WEIGHTS_SAFETENSORS_H_
#define LAYERD_LIB_WEIGHTS_SAFETENSORS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/base/shape.h"
#include "lib/base/tensor.h"

namespace layerd {

class InputFile;

// The longest JSON header that is read or written, in bytes; the limit of the format's own implementation.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// More dimensions of one tensor are refused. (Those that become a Tensor have at most kMaxRank.)
inline constexpr size_t kMaxSafetensorsRank = 64;

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
// the texts of errors. Thread-safe: a pure function.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes,
                                                         std::string_view source);

// Owns the open file; copies share it. Threads: const methods from any number of threads.
class SafetensorsFile {
 public:
  // Reads and checks the header; the data stays where it is.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const std::string& path() const;
  const std::map<std::string, SafetensorsEntry, std::less<>>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return header_.metadata; }
  // Null where there is none. Valid as long as this object.
  const SafetensorsEntry* Find(std::string_view name) const;

  // A tensor of dtype F32, F16 or BF16, read from the file now. NOT_FOUND, reason TENSOR_NOT_FOUND, where there is none
  // of that name; INVALID_ARGUMENT for another dtype or a shape that no Tensor can have.
  absl::StatusOr<Tensor> Read(std::string_view name) const;
  // The elements of a tensor of dtype F64, F32, F16 or BF16, widened exactly. Errors as Read().
  absl::StatusOr<std::vector<double>> ReadDoubles(std::string_view name) const;

 private:
  SafetensorsFile(std::shared_ptr<const InputFile> file, uint64_t data_start, SafetensorsHeader header)
      : file_(std::move(file)), data_start_(data_start), header_(std::move(header)) {}

  absl::StatusOr<const SafetensorsEntry*> Require(std::string_view name) const;

  std::shared_ptr<const InputFile> file_;
  uint64_t data_start_;
  SafetensorsHeader header_;
};

// Writes `tensors` and `metadata` to `path`, replacing a file of that name only when all is written (see ReplaceFile).
// float32 tensors come first, and the data begins at a multiple of 8 bytes, so that every tensor is aligned. The same
// input gives the same bytes. INVALID_ARGUMENT, field "file", for a tensor named "__metadata__", a name or text that is
// not UTF-8, or a header over the limit.
absl::Status WriteSafetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_SAFETENSORS_H_
