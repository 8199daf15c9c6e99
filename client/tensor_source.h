// Tensors as people name them on a command line: a .npy file, a tensor of a .safetensors file, or typed numbers.
#ifndef LAYERD_CLIENT_TENSOR_SOURCE_H_
#define LAYERD_CLIENT_TENSOR_SOURCE_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "lib/base/tensor.h"

namespace layerd {

// "FILE.npy", "FILE.safetensors:NAME", or a list "[0.5, -1.5]", "[[1, 2], [3, 4]]" whose numbers (or "NaN", "Infinity",
// "-Infinity" in quotes) are rounded to `typed_dtype`. A file's tensor keeps its own dtype.
absl::StatusOr<Tensor> ReadTensor(std::string_view text, DType typed_dtype);

// Whether WriteTensor() knows what to make of `text`; INVALID_ARGUMENT otherwise.
absl::Status CheckWritable(std::string_view text);

// Writes FILE.npy, or FILE.safetensors[:NAME] (name "output" where none is given).
absl::Status WriteTensor(std::string_view text, const Tensor& tensor);

}  // namespace layerd

#endif  // LAYERD_CLIENT_TENSOR_SOURCE_H_
