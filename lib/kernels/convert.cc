#include "lib/kernels/convert.h"

#include <cstring>

#include "lib/kernels/highway_targets.h"
#include "lib/kernels/simd.h"

// The order of these matters:
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lib/kernels/convert.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

#if LAYERD_BASELINE_TARGET

int64_t WidenVectors(DType, const std::byte*, float*, int64_t) { return 0; }
int64_t NarrowVectors(DType, const float*, std::byte*, int64_t) { return 0; }

#else

template <class T16>
int64_t WidenAs(const T16* in, float* out, int64_t n) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(LoadFloat32(df, in + i), df, out + i);
  return i;
}

template <class T16>
int64_t NarrowAs(const float* in, T16* out, int64_t n) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) StoreFloat32(df, hn::LoadU(df, in + i), out + i);
  return i;
}

// Converts whole vectors and returns how many elements that was.
int64_t WidenVectors(DType dtype, const std::byte* in, float* out, int64_t n) {
  return dtype == DType::kFloat16 ? WidenAs(reinterpret_cast<const hwy::float16_t*>(in), out, n)
                                  : WidenAs(reinterpret_cast<const hwy::bfloat16_t*>(in), out, n);
}

int64_t NarrowVectors(DType dtype, const float* in, std::byte* out, int64_t n) {
  return dtype == DType::kFloat16 ? NarrowAs(in, reinterpret_cast<hwy::float16_t*>(out), n)
                                  : NarrowAs(in, reinterpret_cast<hwy::bfloat16_t*>(out), n);
}

#endif  // LAYERD_BASELINE_TARGET

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd {
namespace {

HWY_EXPORT(WidenVectors);
HWY_EXPORT(NarrowVectors);

bool HasVectors(DType dtype) { return IsFloat(dtype) && ActiveSimd() != Simd::kScalar; }

}  // namespace

void WidenToFloat(DType dtype, const std::byte* in, float* out, int64_t n) {
  if (n == 0) return;  // `in` and `out` may be null then, which memcpy does not allow
  if (dtype == DType::kFloat32) {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  int64_t i = HasVectors(dtype) ? HWY_DYNAMIC_DISPATCH(WidenVectors)(dtype, in, out, n) : 0;
  for (; i < n; ++i) out[i] = LoadAsFloat(dtype, in, i);
}

void NarrowFromFloat(DType dtype, const float* in, std::byte* out, int64_t n) {
  if (n == 0) return;
  if (dtype == DType::kFloat32) {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  int64_t i = HasVectors(dtype) ? HWY_DYNAMIC_DISPATCH(NarrowVectors)(dtype, in, out, n) : 0;
  for (; i < n; ++i) StoreFromFloat(dtype, in[i], out, i);
}

}  // namespace layerd
#endif  // HWY_ONCE
