#include <algorithm>
#include <cmath>

#include "lib/kernels/matmul_internal.h"
#include "lib/kernels/strips.h"

namespace layerd {
namespace {

// Columns that are summed side by side. Each is a chain of its own, in order of k, so that a compiler may run several
// of them at once, and the twin of a start-up self-test is quick, without a change of bits.
constexpr int64_t kColumns = kPanelOutputs;

// sums[n] = Σₖ x[k · x_stride] · w[k][n] over one block.
__attribute__((always_inline)) inline void SumBlock(const float* x, int64_t x_stride, const float* w, int64_t depth,
                                                    float* sums) {
  std::fill_n(sums, kColumns, 0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    const float xk = x[k * x_stride];
    for (int64_t n = 0; n < kColumns; ++n) sums[n] = std::fma(xk, w[k * kColumns + n], sums[n]);
  }
}

// The same C++, twice: where the CPU has the instruction, std::fma is it, and not a call into libm.
__attribute__((target("avx2,fma"))) void SumBlockWithFma(const float* x, int64_t x_stride, const float* w,
                                                         int64_t depth, float* sums) {
  SumBlock(x, x_stride, w, depth, sums);
}
void SumBlockWithLibm(const float* x, int64_t x_stride, const float* w, int64_t depth, float* sums) {
  SumBlock(x, x_stride, w, depth, sums);
}

void SumBlockAsCan(const float* x, int64_t x_stride, const float* w, int64_t depth, float* sums) {
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  has_fma ? SumBlockWithFma(x, x_stride, w, depth, sums) : SumBlockWithLibm(x, x_stride, w, depth, sums);
}

// Input k and output n of a strip.
float StripWeight(DType dtype, const std::byte* strip, int64_t k, int64_t n) {
  if (dtype != DType::kInt8) return LoadAsFloat(dtype, strip, k * kPanelOutputs + n);
  const std::byte* block = strip + k / kScaleBlock * kInt8BlockBytes;
  const auto kept = static_cast<uint8_t>(block[kInt8ScaleBytes + k % kScaleBlock * kPanelOutputs + n]);
  return LoadAsFloat(DType::kFloat16, block, n) * static_cast<float>(int{kept} - kInt8Offset);
}

}  // namespace

float WeightAt(const WeightView& w, int64_t n, int64_t k) {
  const int64_t index = w.layout == WeightLayout::kOutIn ? n * RowStride(w) + k : k * RowStride(w) + n * w.step;
  if (w.dtype != DType::kInt8) return LoadAsFloat(w.dtype, w.data, index);
  return LoadAsFloat(DType::kFloat16, w.scale, n * ScaleStride(w) + k / kScaleBlock) *
         static_cast<float>(static_cast<int8_t>(w.data[index]));
}

void MatMulScalar(const MatMulTile& tile) {
  const WeightView& w = tile.w;
  float packed[kMatMulBlock * kColumns];
  float sums[kColumns];
  for (int64_t n0 = tile.begin; n0 < tile.end; n0 += kColumns) {
    const int64_t width = std::min(kColumns, tile.end - n0);
    for (int64_t k0 = 0; k0 < w.in; k0 += kMatMulBlock) {
      const int64_t depth = std::min(kMatMulBlock, w.in - k0);
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t n = 0; n < kColumns; ++n) {
          packed[k * kColumns + n] = n < width ? WeightAt(w, n0 + n, k0 + k) : 0.0f;
        }
      }
      for (int64_t m = 0; m < tile.rows; ++m) {
        SumBlockAsCan(tile.x + m * w.in + k0, 1, packed, depth, sums);
        float* y = tile.y + m * tile.y_stride + n0 - tile.begin;
        for (int64_t n = 0; n < width; ++n) y[n] = (k0 == 0 ? 0.0f : y[n]) + sums[n];
        if (k0 + depth < w.in) continue;
        for (int64_t n = 0; n < width; ++n) y[n] = OneNan(tile.bias == nullptr ? y[n] : y[n] + tile.bias[n0 + n]);
      }
    }
  }
}

void WidenStripScalar(DType dtype, const std::byte* strip, int64_t depth, float* widened) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = 0; n < kPanelOutputs; ++n) widened[k * kPanelOutputs + n] = StripWeight(dtype, strip, k, n);
  }
}

void SumStripsScalar(const StripSums& s) {
  const RowBlocks& x = *s.x;
  const int64_t depth = x.Depth(s.k0);
  float sums[kPanelOutputs];
  for (int strip = 0; strip < 2 && s.strips[strip] != nullptr; ++strip) {
    const float* weights = reinterpret_cast<const float*>(s.strips[strip]);
    if (s.dtype != DType::kFloat32) {
      WidenStripScalar(s.dtype, s.strips[strip], depth, s.widened);
      weights = s.widened;
    }
    float* y = s.y[strip];
    for (int64_t group = s.group_begin; group < s.group_end; ++group) {
      const int64_t rows = x.groups().Size(group);
      for (int64_t r = 0; r < rows; ++r, y += kPanelOutputs) {
        SumBlockAsCan(x.At(s.k0, group) + r, rows, weights, depth, sums);
        for (int64_t n = 0; n < kPanelOutputs; ++n) y[n] = (s.k0 == 0 ? 0.0f : y[n]) + sums[n];
      }
    }
  }
}

}  // namespace layerd
