// Arrays of float32, float16, bfloat16 and int8, converted. The meaning of each element is that of lib/base/dtype.h: widening
// is exact, narrowing rounds to nearest even and keeps NaN (of a float). Arrays may be unaligned to the vector but must be aligned
// to their element; source and destination must not overlap.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_KERNELS_CONVERT_H_
#define LAYERD_LIB_KERNELS_CONVERT_H_

#include <cstddef>
#include <cstdint>

#include "lib/base/dtype.h"

namespace layerd {

// out[i] = float32(in[i]).
void WidenToFloat(DType dtype, const std::byte* in, float* out, int64_t n);
// out[i] = dtype(in[i]).
void NarrowFromFloat(DType dtype, const float* in, std::byte* out, int64_t n);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_CONVERT_H_
