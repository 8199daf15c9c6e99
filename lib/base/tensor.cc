#include "lib/base/tensor.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <mutex>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "lib/base/buffer_pool.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

constexpr std::align_val_t kAlignment{64};

std::shared_ptr<const std::byte> AllocateBytes(size_t bytes) {
  alignas(static_cast<size_t>(kAlignment)) static constexpr std::byte kNothing{};
  if (bytes == 0) return {std::shared_ptr<const void>(), &kNothing};
  if (bytes >= BufferPool::kLeastBytes) return BufferPool::OfProcess().Get(bytes);
  auto* data = static_cast<std::byte*>(::operator new(bytes, kAlignment));
  return {data, [](const std::byte* p) { ::operator delete(const_cast<std::byte*>(p), kAlignment); }};
}

bool IsAligned(const std::byte* data, DType dtype) { return reinterpret_cast<uintptr_t>(data) % SizeOf(dtype) == 0; }

// The elements of `shape`, whose bytes are `bytes`.
absl::StatusOr<int64_t> CheckedElements(DType dtype, const Shape& shape, size_t bytes) {
  const auto elements = NumElements(shape);
  if (!elements.ok()) return Under("shape", elements.status());
  const size_t expected = static_cast<size_t>(*elements) * SizeOf(dtype);
  if (bytes != expected) {
    return InvalidField("data", "BYTE_COUNT_MISMATCH",
                        absl::StrCat("expected ", expected, " bytes for ", std::string(Name(dtype)), " ",
                                     ToString(shape), ", got ", bytes));
  }
  return *elements;
}

}  // namespace

// Pieces of memory that follow one another.
class Tensor::Scattered {
 public:
  Scattered(std::shared_ptr<const void> owner, absl::Span<const absl::Span<const std::byte>> pieces)
      : owner_(std::move(owner)), pieces_(pieces.begin(), pieces.end()) {
    begins_.reserve(pieces_.size());
    for (const auto& piece : pieces_) {
      begins_.push_back(bytes_);
      bytes_ += piece.size();
    }
  }

  // Bytes [begin, begin + count), if they lie together; null otherwise.
  const std::byte* Together(size_t begin, size_t count) const {
    const size_t i = PieceOf(begin);
    const size_t offset = begin - begins_[i];
    return offset + count <= pieces_[i].size() ? pieces_[i].data() + offset : nullptr;
  }

  void Copy(size_t begin, size_t count, std::byte* to) const {
    for (size_t i = PieceOf(begin); count > 0; ++i) {
      const size_t offset = begin - begins_[i];
      const size_t part = std::min(count, pieces_[i].size() - offset);
      if (part > 0) std::memcpy(to, pieces_[i].data() + offset, part);
      to += part;
      begin += part;
      count -= part;
    }
  }

  const std::shared_ptr<const std::byte>& Gathered() const {
    std::call_once(once_, [this] {
      auto all = AllocateBytes(bytes_);
      Copy(0, bytes_, const_cast<std::byte*>(all.get()));
      gathered_ = std::move(all);
    });
    return gathered_;
  }

 private:
  // The piece that byte `at` is in; of the last one also its end.
  size_t PieceOf(size_t at) const {
    return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), at) - begins_.begin()) - 1;
  }

  const std::shared_ptr<const void> owner_;
  const std::vector<absl::Span<const std::byte>> pieces_;
  std::vector<size_t> begins_;
  size_t bytes_ = 0;
  mutable std::once_flag once_;
  mutable std::shared_ptr<const std::byte> gathered_;  // set by once_
};

Tensor::Tensor() : Tensor(Allocate(DType::kFloat32, {0})) {}

Tensor Tensor::Allocate(DType dtype, Shape shape) {
  const auto elements = NumElements(shape);
  assert(elements.ok());
  const int64_t n = elements.ok() ? *elements : 0;
  return Tensor(dtype, std::move(shape), n, AllocateBytes(static_cast<size_t>(n) * SizeOf(dtype)));
}

Tensor Tensor::AllocateAt(const MemoryPlace* place, DType dtype, Shape shape) {
  if (place == nullptr) return Allocate(dtype, std::move(shape));
  Tensor tensor = WithoutData(dtype, std::move(shape));
  assert(static_cast<int64_t>(tensor.num_bytes()) <= place->bytes);
  tensor.data_ = place->data;
  return tensor;
}

Tensor Tensor::WithoutData(DType dtype, Shape shape) {
  const auto elements = NumElements(shape);
  assert(elements.ok());
  return Tensor(dtype, std::move(shape), elements.ok() ? *elements : 0, nullptr);
}

absl::StatusOr<Tensor> Tensor::Adopt(DType dtype, Shape shape, std::shared_ptr<const void> owner,
                                     absl::Span<const std::byte> data) {
  const auto elements = CheckedElements(dtype, shape, data.size());
  if (!elements.ok()) return elements.status();
  if (!IsAligned(data.data(), dtype) || data.data() == nullptr) {
    Tensor copy = Allocate(dtype, std::move(shape));
    if (!data.empty()) std::memcpy(copy.mutable_data(), data.data(), data.size());
    return copy;
  }
  return Tensor(dtype, std::move(shape), *elements, std::shared_ptr<const std::byte>(std::move(owner), data.data()));
}

absl::StatusOr<Tensor> Tensor::AdoptPieces(DType dtype, Shape shape, std::shared_ptr<const void> owner,
                                           absl::Span<const absl::Span<const std::byte>> pieces) {
  if (pieces.empty()) return Adopt(dtype, std::move(shape), std::move(owner), {});
  if (pieces.size() == 1 && IsAligned(pieces[0].data(), dtype)) {
    return Adopt(dtype, std::move(shape), std::move(owner), pieces[0]);
  }
  size_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  const auto elements = CheckedElements(dtype, shape, bytes);
  if (!elements.ok()) return elements.status();
  Tensor tensor(dtype, std::move(shape), *elements, nullptr);
  tensor.scattered_ = std::make_shared<const Scattered>(std::move(owner), pieces);
  return tensor;
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

void Tensor::CopyTo(std::byte* to) const {
  if (scattered_ != nullptr) {
    scattered_->Copy(0, num_bytes(), to);
  } else if (num_bytes() > 0) {
    std::memcpy(to, data_.get(), num_bytes());
  }
}

Tensor Tensor::Together() const {
  if (scattered_ == nullptr) return *this;
  Tensor copy = Allocate(dtype_, shape_);
  CopyTo(copy.mutable_data());
  return copy;
}

Tensor Tensor::Reshaped(Shape shape) const {
  const auto elements = NumElements(shape);
  assert(elements.ok() && *elements == num_elements_);
  (void)elements;
  Tensor tensor = *this;
  tensor.shape_ = std::move(shape);
  return tensor;
}

const std::byte* Tensor::Gathered() const { return scattered_->Gathered().get(); }

const std::byte* Tensor::Read(int64_t first, int64_t count, std::byte* to) const {
  const size_t begin = static_cast<size_t>(first) * SizeOf(dtype_), bytes = static_cast<size_t>(count) * SizeOf(dtype_);
  if (scattered_ == nullptr) return data_.get() + begin;
  const std::byte* together = scattered_->Together(begin, bytes);
  if (together != nullptr && IsAligned(together, dtype_)) return together;
  scattered_->Copy(begin, bytes, to);
  return to;
}

Tensor Tensor::Rows(int64_t begin, int64_t count) const {
  assert(rank() > 0 && begin >= 0 && count >= 0 && begin + count <= dim(0));
  const int64_t row_elements = dim(0) == 0 ? 0 : num_elements_ / dim(0);
  Shape shape = shape_;
  shape[0] = count;
  const auto& all = scattered_ == nullptr ? data_ : scattered_->Gathered();
  const std::byte* first = all.get() + begin * row_elements * static_cast<int64_t>(SizeOf(dtype_));
  return Tensor(dtype_, std::move(shape), count * row_elements, std::shared_ptr<const std::byte>(all, first));
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.dtype_ == b.dtype_ && a.shape_ == b.shape_ &&
         (a.num_bytes() == 0 || std::memcmp(a.data(), b.data(), a.num_bytes()) == 0);
}

}  // namespace layerd
