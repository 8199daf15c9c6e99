#include "lib/base/tensor.h"

#include <cassert>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

constexpr std::align_val_t kAlignment{64};

std::shared_ptr<const std::byte> AllocateBytes(size_t bytes) {
  auto* data = static_cast<std::byte*>(::operator new(bytes == 0 ? 1 : bytes, kAlignment));
  return {data, [](const std::byte* p) { ::operator delete(const_cast<std::byte*>(p), kAlignment); }};
}

}  // namespace

Tensor::Tensor() : Tensor(Allocate(DType::kFloat32, {0})) {}

Tensor Tensor::Allocate(DType dtype, Shape shape) {
  const auto elements = NumElements(shape);
  assert(elements.ok());
  const int64_t n = elements.ok() ? *elements : 0;
  return Tensor(dtype, std::move(shape), n, AllocateBytes(static_cast<size_t>(n) * SizeOf(dtype)));
}

Tensor Tensor::WithoutData(DType dtype, Shape shape) {
  const auto elements = NumElements(shape);
  assert(elements.ok());
  return Tensor(dtype, std::move(shape), elements.ok() ? *elements : 0, nullptr);
}

absl::StatusOr<Tensor> Tensor::Adopt(DType dtype, Shape shape, std::shared_ptr<const void> owner,
                                     absl::Span<const std::byte> data) {
  const auto elements = NumElements(shape);
  if (!elements.ok()) return Under("shape", elements.status());
  const size_t expected = static_cast<size_t>(*elements) * SizeOf(dtype);
  if (data.size() != expected) {
    return InvalidField("data", "BYTE_COUNT_MISMATCH",
                        absl::StrCat("expected ", expected, " bytes for ", std::string(Name(dtype)), " ",
                                     ToString(shape), ", got ", data.size()));
  }
  if (reinterpret_cast<uintptr_t>(data.data()) % SizeOf(dtype) != 0 || data.data() == nullptr) {
    Tensor copy = Allocate(dtype, std::move(shape));
    if (expected > 0) std::memcpy(copy.mutable_data(), data.data(), expected);
    return copy;
  }
  return Tensor(dtype, std::move(shape), *elements, std::shared_ptr<const std::byte>(std::move(owner), data.data()));
}

Tensor Tensor::FromFloats(DType dtype, Shape shape, absl::Span<const float> values) {
  Tensor tensor = Allocate(dtype, std::move(shape));
  assert(tensor.num_elements() == static_cast<int64_t>(values.size()));
  for (int64_t i = 0; i < tensor.num_elements(); ++i) StoreFromFloat(dtype, values[i], tensor.mutable_data(), i);
  return tensor;
}

std::vector<float> Tensor::ToFloats() const {
  std::vector<float> values(num_elements_);
  for (int64_t i = 0; i < num_elements_; ++i) values[i] = At(i);
  return values;
}

Tensor Tensor::Reshaped(Shape shape) const {
  const auto elements = NumElements(shape);
  assert(elements.ok() && *elements == num_elements_);
  (void)elements;
  return Tensor(dtype_, std::move(shape), num_elements_, data_);
}

Tensor Tensor::Rows(int64_t begin, int64_t count) const {
  assert(rank() > 0 && begin >= 0 && count >= 0 && begin + count <= dim(0));
  const int64_t row_elements = dim(0) == 0 ? 0 : num_elements_ / dim(0);
  Shape shape = shape_;
  shape[0] = count;
  const std::byte* first = data() + begin * row_elements * static_cast<int64_t>(SizeOf(dtype_));
  return Tensor(dtype_, std::move(shape), count * row_elements, std::shared_ptr<const std::byte>(data_, first));
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.dtype_ == b.dtype_ && a.shape_ == b.shape_ &&
         (a.num_bytes() == 0 || std::memcmp(a.data(), b.data(), a.num_bytes()) == 0);
}

}  // namespace layerd
