// Small weights (γ, β, biases) as float32, shared where they already are, widened into memory of one's own otherwise.
// Threads: const access from any number of threads.
#ifndef LAYERD_LIB_LAYERS_WIDENED_H_
#define LAYERD_LIB_LAYERS_WIDENED_H_

#include <optional>

#include "lib/base/tensor.h"
#include "lib/kernels/convert.h"

namespace layerd {

class Widened {
 public:
  explicit Widened(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    if (tensor->dtype() == DType::kFloat32) {
      floats_ = *tensor;
    } else {
      floats_ = Tensor::Allocate(DType::kFloat32, tensor->shape());
      WidenToFloat(tensor->dtype(), tensor->data(), floats_->mutable_floats(), tensor->num_elements());
    }
  }

  // The elements; null where there was no tensor.
  const float* data() const { return floats_ ? floats_->floats() : nullptr; }

 private:
  std::optional<Tensor> floats_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_WIDENED_H_
