// Shapes of tensors: dimensions in row-major order, checked before anything is computed from them.
#ifndef LAYERD_LIB_BASE_SHAPE_H_
#define LAYERD_LIB_BASE_SHAPE_H_

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/base/dtype.h"

namespace layerd {

// Up to 4 dimensions take no memory of their own: a call makes many shapes, and layers have few dimensions.
using Shape = absl::InlinedVector<int64_t, 4>;

// More dimensions than this are refused.
inline constexpr int kMaxRank = 8;
// Largest dimension and largest element count: what BLAS' 32-bit integers can index along one axis, and what 2⁴⁰ bytes
// hold. Real messages are bounded far below by the message limit; these keep every later product of sizes in int64.
inline constexpr int64_t kMaxDimension = 2147483647;
inline constexpr int64_t kMaxElements = int64_t{1} << 38;

// "[2, 64]".
std::string ToString(absl::Span<const int64_t> shape);

// The product of the dimensions. INVALID_ARGUMENT, without a field path, for a negative dimension, a dimension over
// kMaxDimension, more than kMaxRank dimensions, or a product over kMaxElements of the dimensions that are not 0: so the
// product of any of a legal shape's dimensions fits too. A shape of no dimensions has 1 element.
absl::StatusOr<int64_t> NumElements(absl::Span<const int64_t> shape);

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_SHAPE_H_
