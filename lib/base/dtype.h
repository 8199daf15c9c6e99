// The element types of tensors, and exact conversions between them and float32. Layers compute on the float ones; int8
// is for the values of quantised matrices only (lib/layers/feed_forward.h).
//
// Widening (to float32) is exact. Narrowing rounds to nearest, ties to even; overflow gives infinity; a NaN stays a NaN
// (its sign and leading payload bits are kept, its quiet bit is set). Denormals are kept in both directions. In int8 what
// overflows becomes −128 or 127, and NaN becomes 0.
//
// Threads: everything here is a pure function.
#ifndef LAYERD_LIB_BASE_DTYPE_H_
#define LAYERD_LIB_BASE_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace layerd {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kInt8 };

// Bytes of one element.
constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2; }

constexpr bool IsFloat(DType dtype) { return dtype != DType::kInt8; }

// "float32", "float16", "bfloat16", "int8".
std::string_view Name(DType dtype);

// Of a float dtype: distance between 1 and the next larger value, as a power of two: 23, 10, 7.
constexpr int MantissaBits(DType dtype) { return dtype == DType::kFloat32 ? 23 : dtype == DType::kFloat16 ? 10 : 7; }
// Of a float dtype: exponent of the smallest normal value: -126, -14, -126.
constexpr int MinExponent(DType dtype) { return dtype == DType::kFloat16 ? -14 : -126; }

float WidenFloat16(uint16_t bits);
float WidenBFloat16(uint16_t bits);
uint16_t NarrowToFloat16(float value);
uint16_t NarrowToBFloat16(float value);
int8_t NarrowToInt8(float value);

// The value nearest to `value` that `dtype` can hold, as float32: what narrowing and widening again gives.
float RoundTo(DType dtype, float value);

// One element of an array of `dtype`, widened. `data` need not be aligned.
float LoadAsFloat(DType dtype, const std::byte* data, int64_t index);
// One element of an array of `dtype`, narrowed from `value`. `data` need not be aligned.
void StoreFromFloat(DType dtype, float value, std::byte* data, int64_t index);

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_DTYPE_H_
