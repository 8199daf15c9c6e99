// A dense row-major tensor: dtype, shape and bytes that may be shared with whoever made them.
//
// Copying a Tensor shares its bytes. The bytes are little-endian, as on the wire and in files (the project builds on
// little-endian machines only). data() is aligned at least to the element; memory that Allocate made, to 64 bytes.
//
// A tensor may be scattered: its bytes lie in pieces, as they came off the wire. data() gathers them, once, and so takes
// as much memory again; Read() takes a part as it lies.
//
// Threads: const access from any number of threads; mutable_data() only while nobody else has a copy.
#ifndef LAYERD_LIB_BASE_TENSOR_H_
#define LAYERD_LIB_BASE_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/base/dtype.h"
#include "lib/base/memory_place.h"
#include "lib/base/shape.h"

namespace layerd {

class Tensor {
 public:
  // An empty float32 tensor of shape [0].
  Tensor();

  // Uninitialised memory for `shape`, which must have passed NumElements(), here and below.
  static Tensor Allocate(DType dtype, Shape shape);
  // The same in `place`, which must have room, or in memory of its own where that is null.
  static Tensor AllocateAt(const MemoryPlace* place, DType dtype, Shape shape);
  // A tensor of which only dtype and shape are known; data() is null. For checks that look at no element.
  static Tensor WithoutData(DType dtype, Shape shape);
  // Shares `data`, kept alive by `owner`, without a copy where it is aligned to the element; copies it otherwise.
  // INVALID_ARGUMENT, with field "shape" or "data", for a bad shape or a byte count that does not fit it.
  static absl::StatusOr<Tensor> Adopt(DType dtype, Shape shape, std::shared_ptr<const void> owner,
                                      absl::Span<const std::byte> data);
  // The same for data in pieces that follow one another; without a copy, however they lie.
  static absl::StatusOr<Tensor> AdoptPieces(DType dtype, Shape shape, std::shared_ptr<const void> owner,
                                            absl::Span<const absl::Span<const std::byte>> pieces);
  // A copy of `values`, narrowed to `dtype`. `shape` must hold values.size() elements.
  static Tensor FromFloats(DType dtype, Shape shape, absl::Span<const float> values);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return static_cast<int>(shape_.size()); }
  int64_t dim(int axis) const { return shape_[axis]; }
  int64_t num_elements() const { return num_elements_; }
  size_t num_bytes() const { return static_cast<size_t>(num_elements_) * SizeOf(dtype_); }

  // Throws std::bad_alloc where it has to gather and cannot.
  const std::byte* data() const { return scattered_ == nullptr ? data_.get() : Gathered(); }
  std::byte* mutable_data() { return const_cast<std::byte*>(data()); }
  absl::Span<const std::byte> bytes() const { return {data(), num_bytes()}; }
  // The elements of a float32 tensor.
  const float* floats() const { return reinterpret_cast<const float*>(data()); }
  float* mutable_floats() { return reinterpret_cast<float*>(mutable_data()); }

  bool is_scattered() const { return scattered_ != nullptr; }
  // Where the `count` elements from `first` on lie: in place where they lie together and aligned to the element, else
  // copied to `to`, which has room for them and is aligned.
  const std::byte* Read(int64_t first, int64_t count, std::byte* to) const;

  // Copies all elements to `to`, wherever they lie.
  void CopyTo(std::byte* to) const;

  float At(int64_t index) const { return LoadAsFloat(dtype_, data(), index); }
  // All elements, widened.
  std::vector<float> ToFloats() const;

  // The same, not scattered: a copy of what was, which does not keep the pieces alive.
  Tensor Together() const;
  // The same bytes under another shape of as many elements.
  Tensor Reshaped(Shape shape) const;
  // Elements begin … begin + count − 1 of the first axis; shares the bytes. Rank at least 1, and in range.
  Tensor Rows(int64_t begin, int64_t count) const;
  // True when dtype, shape and every byte are the same.
  friend bool SameBits(const Tensor& a, const Tensor& b);

 private:
  Tensor(DType dtype, Shape shape, int64_t num_elements, std::shared_ptr<const std::byte> data)
      : dtype_(dtype), shape_(std::move(shape)), num_elements_(num_elements), data_(std::move(data)) {}

  class Scattered;
  const std::byte* Gathered() const;

  DType dtype_;
  Shape shape_;
  int64_t num_elements_;
  std::shared_ptr<const std::byte> data_;       // null where it is scattered
  std::shared_ptr<const Scattered> scattered_;  // null where it is not
};

bool SameBits(const Tensor& a, const Tensor& b);

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_TENSOR_H_
