// Dtypes that layers take and give. Threads: pure functions.
#ifndef LAYERD_LIB_LAYERS_CHECK_DTYPE_H_
#define LAYERD_LIB_LAYERS_CHECK_DTYPE_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lib/base/dtype.h"
#include "lib/base/errors.h"
#include "lib/base/tensor.h"

namespace layerd {

// INVALID_ARGUMENT with `field` where there is a dtype, and it is none that a layer computes on.
inline absl::Status CheckFloat(std::string_view field, std::optional<DType> dtype) {
  if (!dtype || IsFloat(*dtype)) return absl::OkStatus();
  return InvalidField(field, "DTYPE_MISMATCH",
                      absl::StrCat("expected float32, float16 or bfloat16, got ", std::string(Name(*dtype))));
}

// The same of a tensor's dtype, where there is a tensor; `field` is the tensor's.
inline absl::Status CheckFloat(std::string_view field, const std::optional<Tensor>& tensor) {
  if (!tensor || IsFloat(tensor->dtype())) return absl::OkStatus();
  return CheckFloat(absl::StrCat(std::string(field), ".dtype"), tensor->dtype());
}

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_CHECK_DTYPE_H_
