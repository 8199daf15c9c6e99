// NumPy's .npy files (versions 1.0 to 3.0), one array each: float32 ("<f4"), float16 ("<f2") and
// int8 ("|i1").
//
// The header is parsed as the strict subset of Python literals that NumPy writes, bounded in length; the file must be
// exactly as long as dtype and shape say. Arrays in Fortran order are brought into C order. Other dtypes are refused,
// and nothing is narrowed: the text says how to convert. .npy has no bfloat16; use .safetensors for it.
//
// Errors of the file's content: INVALID_ARGUMENT, field "file", reason NPY_…. Those of the file system: as in
// lib/weights/file_io.h.
//
// Threads: from any number of threads.
#ifndef LAYERD_LIB_WEIGHTS_NPY_H_
#define LAYERD_LIB_WEIGHTS_NPY_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/base/tensor.h"

namespace layerd {

// The longest header that is read, in bytes: what version 1.0 can express. NumPy itself reads 10,000 by default.
inline constexpr uint64_t kMaxNpyHeaderBytes = 65535;

absl::StatusOr<Tensor> ReadNpy(const std::string& path);

// Writes version 1.0, replacing a file of that name only when all is written (see ReplaceFile).
absl::Status WriteNpy(const std::string& path, const Tensor& tensor);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_NPY_H_
