#include "lib/kernels/matmul_own.h"

#include <algorithm>
#include <utility>

#include "lib/kernels/highway_targets.h"
#include "lib/kernels/scratch.h"
#include "lib/kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lib/kernels/matmul_own.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

#if LAYERD_BASELINE_TARGET || !HWY_ARCH_X86

void Product(const MatMulTile& tile) { MatMulScalar(tile); }
void TransposeOf(DType dtype, const std::byte* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                 int64_t out_stride) {
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t r = 0; r < rows; ++r) out[k * out_stride + r] = LoadAsFloat(dtype, in, r * in_stride + k);
  }
}

#else

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr int64_t kLanes = HWY_TARGET == HWY_AVX2 ? 8 : 16;
// The micro-kernel takes up to kRows rows by kVectors vectors of columns at once: their sums, the weights and an x must
// fit the 16 or 32 registers, and 8 sums are needed to cover the latency of an FMA (4 cycles, two a cycle). A packed
// panel, of 256 by kVectors vectors, is at most 32 KiB, so that it stays in the first-level cache.
constexpr int kRows = HWY_TARGET == HWY_AVX2 ? 6 : 12;
constexpr int kVectors = 2;
constexpr int64_t kPanel = kVectors * kLanes;

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
  const D d;
  const int64_t whole_cols = cols / kLanes * kLanes;
  for (int64_t k = 0; k < rows; ++k) {
    for (int64_t n = 0; n < whole_cols; n += kLanes)
      hn::StoreU(LoadFloat32(d, in + k * in_stride + n), d, out + k * out_stride + n);
    for (int64_t n = whole_cols; n < cols; ++n) out[k * out_stride + n] = ToFloat(in[k * in_stride + n]);
  }
}

// sums[r][n] = Σₖ x[r][k] · packed[k][n] over one block and one panel of columns, for R rows.
template <int R>
HWY_NOINLINE void SumBlock(const float* HWY_RESTRICT x, int64_t x_stride, const float* HWY_RESTRICT packed,
                           int64_t depth, float* HWY_RESTRICT sums) {
  const D d;
  V sum[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  for (int64_t k = 0; k < depth; ++k) {
    V w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = hn::Load(d, packed + k * kPanel + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V xr = hn::Set(d, x[r * x_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(xr, w[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[r][v], d, sums + r * kPanel + v * kLanes);
  }
}

using SumBlockFunction = void (*)(const float*, int64_t, const float*, int64_t, float*);

template <int... kRowsLess1>
SumBlockFunction PickSumBlock(int rows, std::integer_sequence<int, kRowsLess1...>) {
  static constexpr SumBlockFunction kTable[] = {SumBlock<kRowsLess1 + 1>...};
  return kTable[rows - 1];
}

// y[n] of one row: the first block's sums are put there, the others' added, and the last brings the bias.
void AddSums(const float* HWY_RESTRICT sums, int64_t width, bool first, bool last, const float* bias,
             float* HWY_RESTRICT y) {
  if (first) {
    for (int64_t n = 0; n < width; ++n) y[n] = 0.0f + sums[n];
  } else {
    for (int64_t n = 0; n < width; ++n) y[n] = y[n] + sums[n];
  }
  if (!last) return;
  if (bias != nullptr) {
    for (int64_t n = 0; n < width; ++n) y[n] = y[n] + bias[n];
  }
  for (int64_t n = 0; n < width; ++n) y[n] = OneNan(y[n]);
}

template <typename T>
void ProductOf(const MatMulTile& tile) {
  float* packed = Scratch::OfThread().Get(kMatMulBlock * kPanel);
  HWY_ALIGN float sums[kRows * kPanel];

  const WeightView& w = tile.w;
  const T* weights = reinterpret_cast<const T*>(w.data);
  // Groups of equal size: 13 rows as 7 and 6, since a last group of one row would wait for the latency of the FMAs.
  const int64_t groups = (tile.rows + kRows - 1) / kRows;
  // Panels inside a block of k, so that the block of x stays in cache.
  for (int64_t k0 = 0; k0 < w.in; k0 += kMatMulBlock) {
    const int64_t depth = std::min(kMatMulBlock, w.in - k0);
    for (int64_t n0 = tile.begin; n0 < tile.end; n0 += kPanel) {
      const int64_t width = std::min(kPanel, tile.end - n0);
      if (width < kPanel) std::fill(packed, packed + kMatMulBlock * kPanel, 0.0f);
      if (w.layout == WeightLayout::kOutIn) {
        Transpose(weights + n0 * w.in + k0, w.in, width, depth, packed, kPanel);
      } else {
        Widen(weights + k0 * w.out + n0, w.out, depth, width, packed, kPanel);
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = tile.rows * g / groups;
        const int rows = static_cast<int>(tile.rows * (g + 1) / groups - row);
        const SumBlockFunction sum_block = PickSumBlock(rows, std::make_integer_sequence<int, kRows>());
        sum_block(tile.x + row * w.in + k0, w.in, packed, depth, sums);
        for (int r = 0; r < rows; ++r) {
          AddSums(sums + r * kPanel, width, k0 == 0, k0 + depth >= w.in,
                  tile.bias == nullptr ? nullptr : tile.bias + n0, tile.y + (row + r) * w.out + n0);
        }
      }
    }
  }
}

void Product(const MatMulTile& tile) {
  switch (tile.w.dtype) {
    case DType::kFloat32:
      return ProductOf<float>(tile);
    case DType::kFloat16:
      return ProductOf<hwy::float16_t>(tile);
    case DType::kBFloat16:
      return ProductOf<hwy::bfloat16_t>(tile);
  }
}

void TransposeOf(DType dtype, const std::byte* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                 int64_t out_stride) {
  const void* data = in;
  switch (dtype) {
    case DType::kFloat32:
      return Transpose(static_cast<const float*>(data), in_stride, rows, cols, out, out_stride);
    case DType::kFloat16:
      return Transpose(static_cast<const hwy::float16_t*>(data), in_stride, rows, cols, out, out_stride);
    case DType::kBFloat16:
      return Transpose(static_cast<const hwy::bfloat16_t*>(data), in_stride, rows, cols, out, out_stride);
  }
}

#endif  // LAYERD_BASELINE_TARGET || !HWY_ARCH_X86

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd {
namespace {

HWY_EXPORT(Product);
HWY_EXPORT(TransposeOf);

}  // namespace

void MatMulOwn(const MatMulTile& tile) {
  if (ActiveSimd() == Simd::kScalar) return MatMulScalar(tile);
  HWY_DYNAMIC_DISPATCH(Product)(tile);
}

void TransposeToFloat(DType dtype, const std::byte* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                      int64_t out_stride) {
  ActiveSimd();  // before the dispatch, as simd.cc says
  HWY_DYNAMIC_DISPATCH(TransposeOf)(dtype, in, in_stride, rows, cols, out, out_stride);
}

}  // namespace layerd
#endif  // HWY_ONCE
