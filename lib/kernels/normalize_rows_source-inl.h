// What normalize_rows reads: x as float32 or float64 from input, residual and gate.
// Included once per SIMD target, by normalize_rows.cc only.

#include <algorithm>

#include "hwy/highway.h"
#include "lib/kernels/activation_internal.h"
#include "lib/kernels/convert-inl.h"
#include "lib/kernels/convert.h"
#include "lib/kernels/normalize_rows_internal.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_SOURCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_SOURCE_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_SOURCE_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_SOURCE_INL_H_
#endif

#if !LAYERD_BASELINE_TARGET
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

using DW = hn::CappedTag<float, 16>;
using VW = hn::Vec<DW>;
inline constexpr int64_t kWideLanes = static_cast<int64_t>(hn::MaxLanes(DW()));

template <class T>
HWY_NOINLINE void Widen(DType dtype, const T* x, float* to, int64_t n) {
  const DW d;
  int64_t i = 0;
  for (; i + kWideLanes <= n; i += kWideLanes) hn::StoreU(LoadFloat32(d, x + i), d, to + i);
  for (; i < n; ++i) to[i] = LoadAsFloat(dtype, reinterpret_cast<const std::byte*>(x), i);
}

// sum[i] = x[i] + residual[i] in float32, which rounds twice only where that cannot be told from once: float32 has more
// than twice the bits of the narrow types.
template <class T>
HWY_NOINLINE void AddResidual(DType dtype, const T* x, const T* residual, T* sum, int64_t n) {
  const DW d;
  int64_t i = 0;
  for (; i + kWideLanes <= n; i += kWideLanes) {
    const VW value = hn::Add(LoadFloat32(d, x + i), LoadFloat32(d, residual + i));
    StoreFloat32(d, WithOneNan(d, value), sum + i);
  }
  const auto element = [&](const T* from) { return LoadAsFloat(dtype, reinterpret_cast<const std::byte*>(from), i); };
  for (; i < n; ++i) {
    const float value = element(x) + element(residual);
    StoreFromFloat(dtype, ToFloat32WithOneNan(value), reinterpret_cast<std::byte*>(sum), i);
  }
}

// silu of n elements of the gate.
inline void OpenGate(DType dtype, const std::byte* gate, double* opened, int64_t n) {
  constexpr int64_t kChunk = 256;
  float widened[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    WidenToFloat(dtype, gate + i * static_cast<int64_t>(SizeOf(dtype)), widened, count);
    ActivateFloat64({Activation::kSilu}, widened, opened + i, count);
  }
}

// product[i] *= x[i] · scale
HWY_NOINLINE void MultiplyBy(const float* x, double scale, double* product, int64_t n) {
  const hn::CappedTag<double, 8> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto scaled = hn::Mul(LoadFloat64(d, x + i), hn::Set(d, scale));
    hn::StoreU(hn::Mul(scaled, hn::LoadU(d, product + i)), d, product + i);
  }
  for (; i < n; ++i) product[i] *= static_cast<double>(x[i]) * scale;
}

// x as float32, the residual added. Where it lies as float32 in memory already, it is read there.
class FloatSource {
 public:
  explicit FloatSource(const NormalizeRowsArgs& args)
      : args_(args), element_bytes_(static_cast<int64_t>(SizeOf(args.input_dtype))) {}

  // Whether At() points into memory of the caller, so that Make() needs no `made`.
  bool in_place() const { return args_.input_dtype == DType::kFloat32; }
  bool makes() const { return !in_place() || args_.residual != nullptr; }

  // Where the elements from `first` on are once they are made; `made` is where they are put.
  const float* At(int64_t first, const float* made) const {
    if (!in_place()) return made;
    return reinterpret_cast<const float*>(args_.residual != nullptr ? args_.residual_sum : args_.input) + first;
  }
  const std::byte* input_at(int64_t first) const { return args_.input + first * element_bytes_; }
  int64_t element_bytes() const { return element_bytes_; }

  // Makes n elements from `first` on. Where a residual is given, its sum is written too, or, if `added`, was before.
  HWY_NOINLINE void Make(int64_t first, int64_t n, float* made, bool added = false) const {
    switch (args_.input_dtype) {
      case DType::kFloat32:
        if (args_.residual != nullptr && !added) Add<float>(first, n);
        return;
      case DType::kFloat16:
        return MakeAs<hwy::float16_t>(first, n, made, added);
      case DType::kBFloat16:
        return MakeAs<hwy::bfloat16_t>(first, n, made, added);
    }
  }

 private:
  template <class T>
  void Add(int64_t first, int64_t n) const {
    AddResidual(args_.input_dtype, reinterpret_cast<const T*>(args_.input) + first,
                reinterpret_cast<const T*>(args_.residual) + first, reinterpret_cast<T*>(args_.residual_sum) + first,
                n);
  }
  template <class T>
  void MakeAs(int64_t first, int64_t n, float* made, bool added) const {
    if (args_.residual == nullptr) {
      return Widen(args_.input_dtype, reinterpret_cast<const T*>(args_.input) + first, made, n);
    }
    if (!added) Add<T>(first, n);
    Widen(args_.input_dtype, reinterpret_cast<const T*>(args_.residual_sum) + first, made, n);
  }

  const NormalizeRowsArgs& args_;
  int64_t element_bytes_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // !LAYERD_BASELINE_TARGET

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_SOURCE_INL_H_
