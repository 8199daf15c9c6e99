#include "lib/base/dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace layerd {

std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt8:
      return "int8";
  }
  return "unknown";
}

float WidenBFloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t NarrowToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN, made quiet
  // Adding 0x7FFF, plus the last kept bit, carries exactly when the dropped half rounds up, ties to even.
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float WidenFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity and NaN; a signalling NaN is made quiet, as hardware does
    const uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13) | quiet);
  }
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
  // Denormal or zero: magnitude · 2⁻²⁴, exact in float32.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

uint16_t NarrowToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x1FFu));
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // from 65520 on, infinity
  if (magnitude >= 0x38800000u) {                                              // at least 2⁻¹⁴: normal
    const uint32_t rebased = magnitude - ((127u - 15u) << 23);
    return static_cast<uint16_t>(sign | ((rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13));
  }
  // Denormal: adding 0.5 puts the unit 2⁻²⁴ at the last bit of the sum, which the addition rounds to nearest even.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
}

int8_t NarrowToInt8(float value) {
  if (std::isnan(value)) return 0;
  const float held = std::clamp(value, -128.0f, 127.0f);
  // Adding 1.5 · 2²³ puts the unit 1 at the last bit of the sum, which the addition rounds to nearest even.
  return static_cast<int8_t>((held + 0x1.8p23f) - 0x1.8p23f);
}

float RoundTo(DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat32:
      return value;
    case DType::kFloat16:
      return WidenFloat16(NarrowToFloat16(value));
    case DType::kBFloat16:
      return WidenBFloat16(NarrowToBFloat16(value));
    case DType::kInt8:
      return NarrowToInt8(value);
  }
  return value;
}

float LoadAsFloat(DType dtype, const std::byte* data, int64_t index) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  if (dtype == DType::kInt8) return static_cast<int8_t>(data[index]);
  uint16_t bits;
  std::memcpy(&bits, data + index * 2, 2);
  return dtype == DType::kFloat16 ? WidenFloat16(bits) : WidenBFloat16(bits);
}

void StoreFromFloat(DType dtype, float value, std::byte* data, int64_t index) {
  if (dtype == DType::kFloat32) {
    std::memcpy(data + index * 4, &value, 4);
    return;
  }
  if (dtype == DType::kInt8) {
    data[index] = static_cast<std::byte>(NarrowToInt8(value));
    return;
  }
  const uint16_t bits = dtype == DType::kFloat16 ? NarrowToFloat16(value) : NarrowToBFloat16(value);
  std::memcpy(data + index * 2, &bits, 2);
}

}  // namespace layerd
