// Int8 layers for tests.
#ifndef LAYERD_TESTS_LIB_LAYERS_INT8_TESTING_H_
#define LAYERD_TESTS_LIB_LAYERS_INT8_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/layer.h"
#include "lib/layers/quantize.h"
#include "lib/layers/seeded.h"

namespace layerd {

// As SeededFeedForwardWeights() in float32, but with int8 matrices of every value from −128 to 127, and scales that give
// weights of about the same size. spec.layout must be kOutIn.
inline FeedForwardWeights SeededInt8Weights(uint64_t seed, const FeedForwardSpec& spec, int64_t dim, int64_t hidden_dim,
                                            bool biases) {
  FeedForwardWeights weights = SeededFeedForwardWeights(seed, spec, DType::kFloat32, dim, hidden_dim, biases);
  for (const auto& [name, matrix, scale] : kFeedForwardMatrices) {
    if (!(weights.*matrix)) continue;
    const Shape shape = (weights.*matrix)->shape();
    const Shape scales = {shape[0], (shape[1] + kScaleBlock - 1) / kScaleBlock};
    const double mean = std::sqrt(3.0 / static_cast<double>(shape[1])) / 128;
    weights.*matrix = SeededTensor(seed, name, DType::kInt8, shape, 128.5);
    weights.*scale = SeededTensor(seed, std::string(name) + "_scale", DType::kFloat16, scales, mean / 2, mean);
  }
  return weights;
}

// scale · q as float32, which is exact.
inline Tensor Dequantized(const Tensor& values, const Tensor& scale) {
  Tensor floats = Tensor::Allocate(DType::kFloat32, values.shape());
  const int64_t in = values.dim(1);
  for (int64_t i = 0; i < values.num_elements(); ++i) {
    floats.mutable_floats()[i] = scale.At(i / in * scale.dim(1) + i % in / kScaleBlock) * values.At(i);
  }
  return floats;
}

// The float32 layer with the same values.
inline FeedForwardWeights Dequantized(FeedForwardWeights weights) {
  for (const auto& [name, matrix, scale] : kFeedForwardMatrices) {
    if (weights.*scale) weights.*matrix = Dequantized(*(weights.*matrix), *(weights.*scale));
    weights.*scale = std::nullopt;
  }
  return weights;
}

// Every promise of lib/layers/quantize.h, by its own words, for weights [out][in].
inline void ExpectBound(const std::vector<float>& w, int64_t in, const QuantizedMatrix& made) {
  const int64_t blocks = (in + 31) / 32, out = static_cast<int64_t>(w.size()) / in;
  ASSERT_EQ(made.values.shape(), (Shape{out, in}));
  ASSERT_EQ(made.scale.shape(), (Shape{out, blocks}));
  ASSERT_EQ(made.values.dtype(), DType::kInt8);
  ASSERT_EQ(made.scale.dtype(), DType::kFloat16);
  double error = 0, of = 0, largest_error = 0;
  for (int64_t n = 0; n < out; ++n) {
    for (int64_t block = 0; block < blocks; ++block) {
      double largest = 0;
      const int64_t end = std::min(in, block * 32 + 32);
      for (int64_t k = block * 32; k < end; ++k) largest = std::max(largest, std::fabs(double{w[n * in + k]}));
      const double scale = made.scale.At(n * blocks + block);
      ASSERT_GE(scale, largest / 127);
      ASSERT_TRUE(std::isfinite(scale));
      ASSERT_LE(scale / 2, largest * (1 + 0x1p-10) / 254 + 0x1p-25);
      for (int64_t k = block * 32; k < end; ++k) {
        const int64_t at = n * in + k;
        const double difference = w[at] - scale * made.values.At(at);
        ASSERT_LE(std::fabs(difference), scale / 2) << "output " << n << " input " << k << ": " << w[at];
        ASSERT_LE(std::fabs(made.values.At(at)), 127);
        error += difference * difference;
        of += double{w[at]} * w[at];
        largest_error = std::max(largest_error, std::fabs(difference));
      }
    }
  }
  EXPECT_EQ(made.error.max_abs_error, largest_error);
  const double relative = error == 0 ? 0 : std::sqrt(error / of);
  EXPECT_NEAR(made.error.relative_rms_error, relative, 1e-12 * relative);
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_LAYERS_INT8_TESTING_H_
