#include "lib/kernels/strip_filling.h"

#include <algorithm>

#include "lib/base/dtype.h"
#include "lib/kernels/highway_targets.h"
#include "lib/kernels/panels.h"
#include "lib/kernels/simd.h"

// The order of these matters:
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lib/kernels/strip_filling.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

#if LAYERD_BASELINE_TARGET || !HWY_ARCH_X86

void Fill(const WeightView& w, int64_t k0, int64_t depth, int64_t n0, int64_t width, float* strip) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = 0; n < width; ++n) strip[k * kPanelOutputs + n] = WeightAt(w, n0 + n, k0 + k);
  }
}

void TransposeOf(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out, int64_t out_stride) {
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t r = 0; r < rows; ++r) out[k * out_stride + r] = in[r * in_stride + k];
  }
}

#else

inline float ToFloat(float value) { return value; }
inline float ToFloat(hwy::float16_t value) { return WidenFloat16(value.bits); }
inline float ToFloat(hwy::bfloat16_t value) { return WidenBFloat16(value.bits); }

// Row r and row r + 4 of four consecutive elements each, in the lower and the upper half.
template <typename T>
HWY_INLINE hn::Vec<hn::CappedTag<float, 8> > LoadTwoRows(const T* p, int64_t stride) {
  const hn::CappedTag<float, 4> d4;
  return hn::Combine(hn::CappedTag<float, 8>(), LoadFloat32(d4, p + 4 * stride), LoadFloat32(d4, p));
}

// By 8 rows and 4 columns: few enough rows that their cache lines do not evict one another where the stride is a
// multiple of 4096 bytes, as it mostly is.
template <typename T>
void Transpose(const T* in, int64_t in_stride, int64_t rows, int64_t cols, float* HWY_RESTRICT out,
               int64_t out_stride) {
  const hn::CappedTag<float, 8> d;
  const hn::Repartition<double, decltype(d)> dd;
  const int64_t whole_rows = rows / 8 * 8;
  const int64_t whole_cols = cols / 4 * 4;
  for (int64_t r = 0; r < whole_rows; r += 8) {
    for (int64_t k = 0; k < whole_cols; k += 4) {
      const T* p = in + r * in_stride + k;
      const auto row0 = LoadTwoRows(p, in_stride);
      const auto row1 = LoadTwoRows(p + in_stride, in_stride);
      const auto row2 = LoadTwoRows(p + 2 * in_stride, in_stride);
      const auto row3 = LoadTwoRows(p + 3 * in_stride, in_stride);
      // Four by four within each half: pairs of rows, then pairs of pairs.
      const auto low01 = hn::BitCast(dd, hn::InterleaveLower(d, row0, row1));
      const auto low23 = hn::BitCast(dd, hn::InterleaveLower(d, row2, row3));
      const auto high01 = hn::BitCast(dd, hn::InterleaveUpper(d, row0, row1));
      const auto high23 = hn::BitCast(dd, hn::InterleaveUpper(d, row2, row3));
      float* to = out + k * out_stride + r;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, low01, low23)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, low01, low23)), d, to + out_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, high01, high23)), d, to + 2 * out_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, high01, high23)), d, to + 3 * out_stride);
    }
    for (int64_t k = whole_cols; k < cols; ++k) {
      for (int64_t i = r; i < r + 8; ++i) out[k * out_stride + i] = ToFloat(in[i * in_stride + k]);
    }
  }
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t r = whole_rows; r < rows; ++r) out[k * out_stride + r] = ToFloat(in[r * in_stride + k]);
  }
}

// out[k][n] = float32(in[k][n]).
template <typename T>
void Widen(const T* in, int64_t in_stride, int64_t rows, int64_t cols, float* HWY_RESTRICT out, int64_t out_stride) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_TARGET == HWY_AVX2 ? 8 : 16;
  const int64_t whole_cols = cols / kLanes * kLanes;
  for (int64_t k = 0; k < rows; ++k) {
    for (int64_t n = 0; n < whole_cols; n += kLanes)
      hn::StoreU(LoadFloat32(d, in + k * in_stride + n), d, out + k * out_stride + n);
    for (int64_t n = whole_cols; n < cols; ++n) out[k * out_stride + n] = ToFloat(in[k * in_stride + n]);
  }
}

template <typename T>
void FillFrom(const WeightView& w, int64_t k0, int64_t depth, int64_t n0, int64_t width, float* strip) {
  const int64_t stride = RowStride(w);
  const T* weights = reinterpret_cast<const T*>(w.data);
  if (w.layout == WeightLayout::kOutIn) {
    Transpose(weights + n0 * stride + k0, stride, width, depth, strip, kPanelOutputs);
  } else {
    Widen(weights + k0 * stride + n0, stride, depth, width, strip, kPanelOutputs);
  }
}

void Fill(const WeightView& w, int64_t k0, int64_t depth, int64_t n0, int64_t width, float* strip) {
  if (w.step == 1) {
    switch (w.dtype) {
      case DType::kFloat32:
        return FillFrom<float>(w, k0, depth, n0, width, strip);
      case DType::kFloat16:
        return FillFrom<hwy::float16_t>(w, k0, depth, n0, width, strip);
      case DType::kBFloat16:
        return FillFrom<hwy::bfloat16_t>(w, k0, depth, n0, width, strip);
      case DType::kInt8:
        break;
    }
  }
  for (int64_t n = 0; n < width; ++n) {
    for (int64_t k = 0; k < depth; ++k) strip[k * kPanelOutputs + n] = WeightAt(w, n0 + n, k0 + k);
  }
}

void TransposeOf(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out, int64_t out_stride) {
  Transpose(in, in_stride, rows, cols, out, out_stride);
}

#endif  // LAYERD_BASELINE_TARGET || !HWY_ARCH_X86

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd {
namespace {

HWY_EXPORT(Fill);
HWY_EXPORT(TransposeOf);

}  // namespace

// ActiveSimd() before each dispatch, as simd.cc says.

void FillStrip(const WeightView& w, int64_t k0, int64_t depth, int64_t n0, float* strip) {
  ActiveSimd();
  const int64_t width = std::min(kPanelOutputs, w.out - n0);
  if (width < kPanelOutputs) std::fill_n(strip, depth * kPanelOutputs, 0.0f);
  HWY_DYNAMIC_DISPATCH(Fill)(w, k0, depth, n0, width, strip);
}

void TransposeFloats(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out, int64_t out_stride) {
  ActiveSimd();
  HWY_DYNAMIC_DISPATCH(TransposeOf)(in, in_stride, rows, cols, out, out_stride);
}

}  // namespace layerd
#endif  // HWY_ONCE
