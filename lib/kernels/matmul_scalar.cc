#include <algorithm>
#include <cmath>

#include "lib/kernels/matmul_own.h"

namespace layerd {
namespace {

// Columns that are summed side by side. Each is a chain of its own, in order of k, so that a compiler may run several
// of them at once, and the twin of a start-up self-test is quick, without a change of bits.
constexpr int64_t kPanel = 32;

__attribute__((always_inline)) inline void Product(const MatMulTile& tile) {
  const WeightView& w = tile.w;
  float packed[kMatMulBlock * kPanel];
  for (int64_t n0 = tile.begin; n0 < tile.end; n0 += kPanel) {
    const int64_t width = std::min(kPanel, tile.end - n0);
    for (int64_t k0 = 0; k0 < w.in; k0 += kMatMulBlock) {
      const int64_t depth = std::min(kMatMulBlock, w.in - k0);
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t n = 0; n < kPanel; ++n) {
          const int64_t index = w.layout == WeightLayout::kInOut ? (k0 + k) * w.out + n0 + n : (n0 + n) * w.in + k0 + k;
          packed[k * kPanel + n] = n < width ? LoadAsFloat(w.dtype, w.data, index) : 0.0f;
        }
      }
      for (int64_t m = 0; m < tile.rows; ++m) {
        float sums[kPanel] = {};
        for (int64_t k = 0; k < depth; ++k) {
          const float x = tile.x[m * w.in + k0 + k];
          for (int64_t n = 0; n < kPanel; ++n) sums[n] = std::fma(x, packed[k * kPanel + n], sums[n]);
        }
        float* y = tile.y + m * w.out + n0;
        for (int64_t n = 0; n < width; ++n) y[n] = (k0 == 0 ? 0.0f : y[n]) + sums[n];
        if (k0 + depth < w.in) continue;
        for (int64_t n = 0; n < width; ++n) y[n] = OneNan(tile.bias == nullptr ? y[n] : y[n] + tile.bias[n0 + n]);
      }
    }
  }
}

// The same C++, twice: where the CPU has the instruction, std::fma is it, and not a call into libm.
__attribute__((target("avx2,fma"))) void ProductWithFma(const MatMulTile& tile) { Product(tile); }
void ProductWithLibm(const MatMulTile& tile) { Product(tile); }

}  // namespace

void MatMulScalar(const MatMulTile& tile) {
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  has_fma ? ProductWithFma(tile) : ProductWithLibm(tile);
}

}  // namespace layerd
