// Weight matrices that own their memory, and products of them in the order of matmul.h written as it reads.
#ifndef LAYERD_TESTS_LIB_KERNELS_PRODUCT_TESTING_H_
#define LAYERD_TESTS_LIB_KERNELS_PRODUCT_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lib/base/dtype.h"
#include "lib/base/parallel.h"
#include "lib/kernels/matmul.h"
#include "lib/kernels/panels.h"
#include "lib/kernels/product.h"

namespace layerd {

inline constexpr DType kWeightDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8};

// Where a matrix lies: by itself; in the wider rows of a larger one; in every second row ([out, in]) or column
// ([in, out]) of one, as interleaved gate and up do.
enum class Within : uint8_t { kNothing, kWiderRows, kEverySecond };
inline constexpr Within kWithins[] = {Within::kNothing, Within::kWiderRows, Within::kEverySecond};

// The layouts that matrices of a dtype come in.
inline std::vector<WeightLayout> LayoutsOf(DType dtype) {
  if (dtype == DType::kInt8) return {WeightLayout::kOutIn};
  return {WeightLayout::kInOut, WeightLayout::kOutIn};
}

class TestMatrix {
 public:
  // All bits set, in the matrix and around it: NaN of every float dtype, scales included.
  TestMatrix(DType dtype, WeightLayout layout, int64_t in, int64_t out, Within within = Within::kNothing)
      : dtype_(dtype), layout_(layout), in_(in), out_(out), within_(within) {
    const bool out_in = layout == WeightLayout::kOutIn;
    const int64_t lines = out_in ? out : in, width = out_in ? in : out;
    stride_ = width, scale_stride_ = blocks();
    if (within == Within::kWiderRows) {
      origin_ = 3, stride_ = width + 5;
      scale_origin_ = 1, scale_stride_ = blocks() + 2;
    } else if (within == Within::kEverySecond) {
      stride_ = 2 * width, step_ = out_in ? 1 : 2;
      origin_ = out_in ? width : 1;
      scale_origin_ = blocks(), scale_stride_ = 2 * blocks();
    }
    // No byte more than there has to be, so that a sanitizer sees what is read beyond.
    const int64_t elements = lines * width == 0 ? 0 : origin_ + (lines - 1) * stride_ + (width - 1) * step_ + 1;
    data_.assign(static_cast<size_t>(elements) * SizeOf(dtype), std::byte{0xFF});
    if (dtype != DType::kInt8) return;
    scale_.assign(static_cast<size_t>(scale_origin_ + (out - 1) * scale_stride_ + blocks()) * 2, std::byte{0xFF});
  }

  DType dtype() const { return dtype_; }
  WeightLayout layout() const { return layout_; }
  int64_t in() const { return in_; }
  int64_t out() const { return out_; }
  int64_t blocks() const { return (in_ + kScaleBlock - 1) / kScaleBlock; }

  WeightView View() const {
    WeightView view = {dtype_, layout_, in_, out_, data_.data() + origin_ * static_cast<int64_t>(SizeOf(dtype_))};
    if (dtype_ == DType::kInt8) view.scale = scale_.data() + scale_origin_ * 2;
    if (within_ == Within::kNothing) return view;
    view.stride = stride_, view.step = step_, view.scale_stride = scale_stride_;
    return view;
  }

  // Element w(n, k) in memory; of int8 the value without its scale.
  int64_t Index(int64_t n, int64_t k) const {
    return origin_ + (layout_ == WeightLayout::kOutIn ? n * stride_ + k : k * stride_ + n * step_);
  }
  int64_t ScaleIndex(int64_t n, int64_t block) const { return scale_origin_ + n * scale_stride_ + block; }
  const std::vector<std::byte>& data() const { return data_; }
  const std::vector<std::byte>& scale() const { return scale_; }

  float At(int64_t n, int64_t k) const {
    const float value = LoadAsFloat(dtype_, data_.data(), Index(n, k));
    if (dtype_ != DType::kInt8) return value;
    return LoadAsFloat(DType::kFloat16, scale_.data(), ScaleIndex(n, k / kScaleBlock)) * value;
  }
  // `value` rounded to the dtype; of int8 the value without its scale.
  void Set(int64_t n, int64_t k, float value) { StoreFromFloat(dtype_, value, data_.data(), Index(n, k)); }

  // w(n, k) = weight(n, k), asked in order of n, then k. Int8 matrices are quantised, each block by its greatest magnitude.
  template <typename Weight>
  void Fill(const Weight& weight) {
    std::vector<float> row(static_cast<size_t>(in_));
    for (int64_t n = 0; n < out_; ++n) {
      for (int64_t k = 0; k < in_; ++k) row[k] = weight(n, k);
      for (int64_t k0 = 0; k0 < in_; k0 += kScaleBlock) {
        const int64_t end = std::min(in_, k0 + kScaleBlock);
        const float scale = dtype_ == DType::kInt8 ? ChooseScale(n, k0, row.data() + k0, end - k0) : 1;
        for (int64_t k = k0; k < end; ++k) Set(n, k, scale == 0 ? 0 : row[k] / scale);
      }
    }
  }
  void FillNormal(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Fill([&](int64_t, int64_t) { return normal(random); });
  }
  // Any bits: NaN with payloads, infinities and denormals among them.
  void FillBits(uint32_t seed) {
    std::mt19937 random(seed);
    const auto width = static_cast<int64_t>(SizeOf(dtype_));
    for (int64_t n = 0; n < out_; ++n) {
      for (int64_t k = 0; k < in_; ++k) {
        for (int64_t b = 0; b < width; ++b) data_[Index(n, k) * width + b] = static_cast<std::byte>(random());
      }
      for (int64_t b = 0; dtype_ == DType::kInt8 && b < 2 * blocks(); ++b) {
        scale_[ScaleIndex(n, 0) * 2 + b] = static_cast<std::byte>(random());
      }
    }
  }

  std::string Name() const {
    constexpr const char* kWithinNames[] = {"", " within wider rows", " in every second"};
    return absl::StrCat(in_, " -> ", out_, " ", std::string(layerd::Name(dtype_)),
                        layout_ == WeightLayout::kInOut ? " [in, out]" : " [out, in]",
                        kWithinNames[static_cast<int>(within_)]);
  }

 private:
  float ChooseScale(int64_t n, int64_t k0, const float* weights, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(weights[i]));
    const int64_t index = ScaleIndex(n, k0 / kScaleBlock);
    StoreFromFloat(DType::kFloat16, largest / 127, scale_.data(), index);
    return LoadAsFloat(DType::kFloat16, scale_.data(), index);
  }

  DType dtype_;
  WeightLayout layout_;
  int64_t in_, out_;
  Within within_;
  int64_t origin_ = 0, stride_, step_ = 1, scale_origin_ = 0, scale_stride_;
  std::vector<std::byte> data_, scale_;
};

inline Panels PanelsOf(const WeightView& view) {
  Panels panels(view.dtype, view.in, view.out);
  panels.Pack(view, 0, 0);
  return panels;
}

inline std::vector<float> NormalFloats(uint32_t seed, int64_t count) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// The order of N4, as it reads: y[m][n], where w(n, k) gives the weights and `bias` may be empty.
template <typename Weight>
std::vector<float> ProductInOrder(const std::vector<float>& x, int64_t rows, int64_t in, int64_t out, const Weight& w,
                                  const std::vector<float>& bias) {
  std::vector<float> y(static_cast<size_t>(rows * out)), weights(static_cast<size_t>(in));
  for (int64_t n = 0; n < out; ++n) {
    for (int64_t k = 0; k < in; ++k) weights[k] = w(n, k);
    for (int64_t m = 0; m < rows; ++m) {
      float total = 0;
      for (int64_t k0 = 0; k0 < in; k0 += 256) {
        float sum = 0;
        for (int64_t k = k0; k < std::min(k0 + 256, in); ++k) sum = std::fma(x[m * in + k], weights[k], sum);
        total += sum;
      }
      if (!bias.empty()) total += bias[n];
      y[m * out + n] = std::isnan(total) ? std::bit_cast<float>(0x7FC00000u) : total;
    }
  }
  return y;
}

// The greatest share of N4's bound that an error of y = x · w takes. The exact sum is taken in long double: by 2⁻³⁶ of the bound
// at most it is not.
inline double ShareOfErrorBound(const std::vector<float>& x, const std::vector<float>& y, int64_t rows,
                                const TestMatrix& w) {
  const int64_t in = w.in();
  const double blocks = std::ceil(static_cast<double>(in) / 256);
  double worst = 0;
  std::vector<long double> weights(static_cast<size_t>(in));
  for (int64_t n = 0; n < w.out(); ++n) {
    for (int64_t k = 0; k < in; ++k) weights[k] = w.At(n, k);
    for (int64_t m = 0; m < rows; ++m) {
      long double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < in; ++k) {
        const long double product = x[m * in + k] * weights[k];
        sum += product;
        magnitude += std::fabs(product);
      }
      const double bound =
          (256 + blocks) * 0x1p-24 * static_cast<double>(magnitude) + static_cast<double>(in) * 0x1p-150;
      const long double error = std::fabs(y[m * w.out() + n] - sum);
      if (!(error <= bound)) return 1e30;  // NaN and infinity among them
      worst = std::max(worst, static_cast<double>(error / bound));
    }
  }
  return worst;
}

inline std::vector<float> MultiplyPacked(const Arena& arena, const std::vector<float>& x, int64_t rows,
                                         const Panels& w) {
  std::vector<float> memory(x.size()), y(static_cast<size_t>(rows * w.out()), -1234.5f);
  const Factor factor = {.panels = &w};
  RowBlocks blocks(memory.data(), rows, w.in(), ProductGroupRows(rows, factor, nullptr));
  blocks.PutRows(0, rows, DType::kFloat32, reinterpret_cast<const std::byte*>(x.data()));
  Product(arena, blocks, factor, nullptr, [&](const ProductTile& tile) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      std::copy_n(tile.first + r * tile.stride, tile.cols, &y[(tile.row + r) * w.out() + tile.col]);
    }
  });
  return y;
}

inline ::testing::AssertionResult SameBits(const std::vector<float>& got, const std::vector<float>& expected,
                                           int64_t out) {
  if (got.size() != expected.size()) return ::testing::AssertionFailure() << "sizes differ";
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
    return ::testing::AssertionFailure() << absl::StrFormat("at [%d, %d]: got %g (0x%08X), expected %g (0x%08X)",
                                                            i / out, i % out, got[i], std::bit_cast<uint32_t>(got[i]),
                                                            expected[i], std::bit_cast<uint32_t>(expected[i]));
  }
  return ::testing::AssertionSuccess();
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_KERNELS_PRODUCT_TESTING_H_
