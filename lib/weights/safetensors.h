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

#include <cstddef>
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
#include "absl/types/span.h"
#include "lib/base/tensor.h"
#include "lib/weights/safetensors_header.h"

namespace layerd {

class InputFile;

// Owns the open file; copies share it. Threads: const methods from any number of threads.
class SafetensorsFile {
 public:
  // Reads and checks the header; the data stays where it is.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  static absl::StatusOr<SafetensorsFile> Open(InputFile file);

  const std::string& path() const;
  const std::map<std::string, SafetensorsEntry, std::less<>>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return header_.metadata; }
  // Null where there is none. Valid as long as this object.
  const SafetensorsEntry* Find(std::string_view name) const;

  // A tensor of dtype F32, F16, BF16 or I8, read from the file now. NOT_FOUND, reason TENSOR_NOT_FOUND, where there is none
  // of that name; INVALID_ARGUMENT for another dtype or a shape that no Tensor can have.
  absl::StatusOr<Tensor> Read(std::string_view name) const;
  // The elements of a tensor of dtype F64, F32, F16, BF16 or I8, widened exactly. Errors as Read().
  absl::StatusOr<std::vector<double>> ReadDoubles(std::string_view name) const;
  // Fills `out` with bytes of a tensor of this file, from `offset` on, which must lie within it. Errors of the file system.
  absl::Status ReadAt(const SafetensorsEntry& entry, uint64_t offset, absl::Span<std::byte> out) const;
  // Whether nobody has written to the file since it was opened (InputFile::IsUnchanged).
  bool IsUnchanged() const;

 private:
  SafetensorsFile(std::shared_ptr<const InputFile> file, uint64_t data_start, SafetensorsHeader header)
      : file_(std::move(file)), data_start_(data_start), header_(std::move(header)) {}

  absl::StatusOr<const SafetensorsEntry*> Require(std::string_view name) const;

  std::shared_ptr<const InputFile> file_;
  uint64_t data_start_;
  SafetensorsHeader header_;
};

// The order in which a file has its tensors here: those with the widest elements first, then by name. As the data begins at a multiple of 8
// bytes, every tensor is aligned.
std::vector<std::pair<std::string, Tensor>> InFileOrder(const std::map<std::string, Tensor>& tensors);

// A file up to its data: the length and the header, padded to a multiple of 8 bytes. The bytes of `tensors` follow in
// the order given here. No element is looked at, so outlines will do. `source` stands for the file in the texts of
// errors: INVALID_ARGUMENT, field "file", for a tensor named "__metadata__", a name or text that is not UTF-8, or a
// header over the limit. Thread-safe: a pure function.
absl::StatusOr<std::string> SafetensorsHead(absl::Span<const std::pair<std::string, Tensor>> tensors,
                                            const std::map<std::string, std::string>& metadata,
                                            std::string_view source);

// Writes `tensors` and `metadata` to `path`, replacing a file of that name only when all is written (see ReplaceFile).
// The same input gives the same bytes. Errors: those of SafetensorsHead() and of the file system.
absl::Status WriteSafetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_SAFETENSORS_H_
