#include "lib/layers/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {
namespace {

const std::string kHash(64, 'a');

// [out, in] of float32; or, where `layout` says so, its transpose.
Tensor Matrix(const std::vector<float>& out_in, int64_t out, int64_t in, WeightLayout layout = WeightLayout::kOutIn) {
  if (layout == WeightLayout::kOutIn) return Tensor::FromFloats(DType::kFloat32, {out, in}, out_in);
  std::vector<float> in_out(out_in.size());
  for (int64_t n = 0; n < out; ++n) {
    for (int64_t k = 0; k < in; ++k) in_out[k * out + n] = out_in[n * in + k];
  }
  return Tensor::FromFloats(DType::kFloat32, {in, out}, in_out);
}

QuantizedMatrix Quantized(const Tensor& matrix, WeightLayout layout = WeightLayout::kOutIn) {
  const Arena arena(2);
  auto made = QuantizeMatrix(arena, "up", matrix, layout);
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

TEST(QuantizeMatrixTest, KeepsItsBoundOnRandomWeightsOfEveryShapeAndLayout) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (const auto& [out, in] : {std::pair(1, 1), std::pair(3, 31), std::pair(5, 32), std::pair(70, 33),
                                std::pair(33, 64), std::pair(40, 1000)}) {
    std::vector<float> w(static_cast<size_t>(out * in));
    for (float& one : w) one = normal(random);
    const QuantizedMatrix made = Quantized(Matrix(w, out, in));
    ExpectBound(w, in, made);
    EXPECT_LT(made.error.relative_rms_error, 0.007);  // 8 bits of a normal distribution
    const QuantizedMatrix transposed = Quantized(Matrix(w, out, in, WeightLayout::kInOut), WeightLayout::kInOut);
    EXPECT_TRUE(SameBits(transposed.values, made.values));
    EXPECT_TRUE(SameBits(transposed.scale, made.scale));
    EXPECT_EQ(transposed.error.relative_rms_error, made.error.relative_rms_error);
  }
}

TEST(QuantizeMatrixTest, KeepsItsBoundOnBlocksThatAreHardToRepresent) {
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  std::vector<std::vector<float>> blocks;
  // Every magnitude that a block may have, from the least denormal on, with weights far apart in it.
  for (int exponent = -149; exponent <= 22; ++exponent) {
    std::vector<float> block;
    for (int i = 0; i < 32; ++i) {
      block.push_back(std::ldexp(1.0f + static_cast<float>(i) / 32, exponent - i * 5) * (i % 2 == 0 ? 1.0f : -1.0f));
    }
    blocks.push_back(block);
  }
  // Around every place where a scale is rounded: 127 times each float16 of some ranges, and the float32 on either side.
  for (const uint32_t first : {0x0000u, 0x03F0u, 0x0400u, 0x3BF0u, 0x7BE0u}) {
    for (uint32_t bits = first; bits < first + 31 && bits < 0x7C00u; ++bits) {
      const float exact = WidenFloat16(static_cast<uint16_t>(bits)) * 127.0f;
      for (const float largest : {exact, std::nextafter(exact, 0.0f), std::nextafter(exact, 1.0f)}) {
        std::vector<float> block(32);
        // Weights at the ties between the steps, and beside them.
        for (int i = 0; i < 32; ++i) block[i] = largest * (static_cast<float>(4 * i) + 0.5f) / 127.0f;
        block[31] = -largest;
        block[30] = std::nextafter(block[29], 0.0f);
        if (largest <= kMaxQuantizedWeight) blocks.push_back(block);
      }
    }
  }
  blocks.push_back(std::vector<float>(32, 0.0f));
  blocks.push_back(std::vector<float>(32, -0.0f));
  blocks.push_back(std::vector<float>(32, kLeast));
  blocks.push_back(std::vector<float>(32, kMaxQuantizedWeight));
  for (const float large : {1.0f, 8e6f, 1e-4f}) {  // one weight that drowns all others
    std::vector<float> block(32, kLeast);
    block[17] = -large;
    blocks.push_back(block);
  }
  std::vector<float> all;
  for (const auto& block : blocks) all.insert(all.end(), block.begin(), block.end());
  const QuantizedMatrix made = Quantized(Matrix(all, 1, static_cast<int64_t>(all.size())));
  ExpectBound(all, static_cast<int64_t>(all.size()), made);
  // Blocks of zeros have the scale 0, all others do not.
  for (size_t block = 0; block < blocks.size(); ++block) {
    const bool zeros = std::all_of(blocks[block].begin(), blocks[block].end(), [](float w) { return w == 0; });
    EXPECT_EQ(made.scale.At(static_cast<int64_t>(block)) == 0, zeros) << block;
  }
}

TEST(QuantizeMatrixTest, RoundsTiesToEvenAndReachesBothEnds) {
  // The scale is 1: 127 is the largest.
  std::vector<float> w = {127, -127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f, -126.5f, 0.50001f, -0.0f};
  const QuantizedMatrix made = Quantized(Matrix(w, 1, static_cast<int64_t>(w.size())));
  EXPECT_EQ(made.scale.ToFloats(), std::vector<float>{1});
  EXPECT_EQ(made.values.ToFloats(), (std::vector<float>{127, -127, 0, 2, 2, 0, -2, -2, 126, -126, 1, 0}));
}

TEST(QuantizeMatrixTest, WhatItGaveItGivesAgain) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> w(50 * 96);
  for (size_t i = 0; i < w.size(); ++i) w[i] = normal(random) * std::ldexp(1.0f, 17 - static_cast<int>(i / 192));
  const QuantizedMatrix once = Quantized(Matrix(w, 50, 96));
  const Tensor dequantized = Dequantized(once.values, once.scale);
  const QuantizedMatrix twice = Quantized(dequantized);
  EXPECT_TRUE(SameBits(Dequantized(twice.values, twice.scale), dequantized));
  EXPECT_EQ(twice.error.max_abs_error, 0);
  EXPECT_EQ(twice.error.relative_rms_error, 0);
}

TEST(QuantizeMatrixTest, SixteenBitWeightsAreWidenedFirst) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Tensor narrow = SeededTensor(4, "up", dtype, {40, 70}, 0.1);
    const QuantizedMatrix made = Quantized(narrow);
    const QuantizedMatrix wide = Quantized(Tensor::FromFloats(DType::kFloat32, narrow.shape(), narrow.ToFloats()));
    EXPECT_TRUE(SameBits(made.values, wide.values) && SameBits(made.scale, wide.scale)) << Name(dtype);
    ExpectBound(narrow.ToFloats(), 70, made);
  }
}

TEST(QuantizeMatrixTest, RefusesWhatHasNoScaleNamingTheFirst) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto& [value, text] :
       {std::pair(std::numeric_limits<float>::quiet_NaN(), "got nan for output 40, input 3"),
        std::pair(infinity, "got inf for output 40, input 3"), std::pair(-infinity, "got -inf for output 40, input 3"),
        std::pair(std::nextafter(kMaxQuantizedWeight, 1e9f), "for output 40, input 3"),
        std::pair(-3e38f, "got -3e+38 for output 40, input 3")}) {
    for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
      std::vector<float> w(100 * 64, 1.0f);
      w[40 * 64 + 3] = value;
      w[40 * 64 + 5] = w[41 * 64] = w[99 * 64 + 63] = infinity;
      const Arena arena(2);
      const absl::Status status = QuantizeMatrix(arena, "down", Matrix(w, 100, 64, layout), layout).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(DetailsOf(status).field, "weights.down");
      EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status;
    }
  }
}

// The layer that `layer`, quantised, ought to be, made one matrix at a time.
TEST(QuantizeTest, KeepsAllButMatricesAndLayoutAndMeasuresBoth) {
  const Arena arena(2);
  for (const GateUpPacking packing : {GateUpPacking::kSeparate, GateUpPacking::kHalves, GateUpPacking::kInterleaved}) {
    for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
      FeedForwardLayer layer;
      layer.spec.packing = packing;
      layer.spec.layout = layout;
      layer.spec.inner_norm = InnerNorm{1e-5};
      layer.weights = SeededFeedForwardWeights(5, layer.spec, DType::kBFloat16, 48, 70, /*biases=*/true);
      const auto made = Quantize(arena, layer, kHash, {.rows = 7, .seed = 11});
      ASSERT_TRUE(made.ok()) << made.status();
      ASSERT_TRUE(CheckLayer(*made).ok()) << CheckLayer(*made).status();
      EXPECT_EQ(made->spec.layout, WeightLayout::kOutIn);
      EXPECT_EQ(made->spec.packing, packing);
      EXPECT_TRUE(SameBits(*made->weights.down_bias, *layer.weights.down_bias));
      EXPECT_TRUE(SameBits(*made->weights.inner_norm_gamma, *layer.weights.inner_norm_gamma));
      const Quantization& told = *made->quantization;
      EXPECT_EQ(told.source_hash, kHash);
      EXPECT_EQ(told.rows, 7);
      EXPECT_EQ(told.seed, 11);
      size_t matrices = 0;
      for (const auto& [role, matrix, scale] : kFeedForwardMatrices) {
        ASSERT_EQ((made->weights.*matrix).has_value(), (layer.weights.*matrix).has_value());
        if (!(layer.weights.*matrix)) continue;
        const QuantizedMatrix one = Quantized(*(layer.weights.*matrix), layout);
        EXPECT_TRUE(SameBits(one.values, *(made->weights.*matrix)));
        EXPECT_TRUE(SameBits(one.scale, *(made->weights.*scale)));
        ASSERT_LT(matrices, told.matrices.size());
        EXPECT_EQ(told.matrices[matrices].role, role);
        EXPECT_EQ(told.matrices[matrices].max_abs_error, one.error.max_abs_error);
        ++matrices;
      }
      EXPECT_EQ(matrices, told.matrices.size());

      const Tensor input = SeededInput(11, DType::kFloat32, {7, 48});
      const auto y = FeedForward(arena, layer.spec, layer.weights, input, std::nullopt, false);
      const auto z = FeedForward(arena, made->spec, made->weights, input, std::nullopt, false);
      ASSERT_TRUE(y.ok() && z.ok());
      double error = 0, of = 0;
      for (int64_t i = 0; i < y->output.num_elements(); ++i) {
        error += std::pow(double{z->output.At(i)} - y->output.At(i), 2);
        of += std::pow(double{y->output.At(i)}, 2);
      }
      ASSERT_TRUE(told.output_relative_rms_error);
      EXPECT_NEAR(*told.output_relative_rms_error, std::sqrt(error / of), 1e-12);
      EXPECT_GT(*told.output_relative_rms_error, 1e-4);
      EXPECT_LT(*told.output_relative_rms_error, 0.02);
    }
  }
}

TEST(QuantizeTest, AnOutputThatIsNotFiniteHasNoError) {
  FeedForwardLayer layer;
  layer.spec = ReluSpec();
  layer.weights.up = Tensor::FromFloats(DType::kFloat32, {1, 1}, {8e6f});
  layer.weights.down = Tensor::FromFloats(DType::kFloat32, {1, 1}, {1.0f});
  layer.weights.down_bias = Tensor::FromFloats(DType::kFloat32, {1}, {std::numeric_limits<float>::infinity()});
  const auto made = Quantize(Arena(1), layer, kHash, {.rows = 2, .seed = 1});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_FALSE(made->quantization->output_relative_rms_error);
  EXPECT_TRUE(CheckLayer(*made).ok()) << CheckLayer(*made).status();
}

TEST(QuantizeTest, ALayerOfZerosHasNoErrorAtAll) {
  FeedForwardLayer layer;
  layer.spec = ReluSpec();
  layer.weights.up = Tensor::FromFloats(DType::kFloat32, {2, 1}, {0, 0});
  layer.weights.down = Tensor::FromFloats(DType::kFloat32, {1, 2}, {0, -0.0f});
  const auto made = Quantize(Arena(1), layer, kHash, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->quantization->output_relative_rms_error, 0.0);
  EXPECT_EQ(made->quantization->matrices[0].relative_rms_error, 0.0);
}

TEST(QuantizeTest, RefusesWhatIsQuantisedAlreadyAndWhatIsNoLayer) {
  FeedForwardLayer layer;
  layer.weights = SeededInt8Weights(1, layer.spec, 40, 12, false);
  absl::Status status = Quantize(Arena(1), layer, kHash, {}).status();
  EXPECT_EQ(DetailsOf(status).field, "weights.gate.dtype");
  EXPECT_EQ(status.message(), "weights.gate.dtype: expected float32, float16 or bfloat16 to quantise, got int8");
  layer.weights = {};
  status = Quantize(Arena(1), layer, kHash, {}).status();
  EXPECT_EQ(DetailsOf(status).field, "weights.gate");
}

struct BadFigures {
  const char* field;
  const char* text;
  std::function<void(FeedForwardLayer&)> spoil;
};

TEST(QuantizationTest, WhatCannotBeIsRefusedByField) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<BadFigures> bad = {
      {"quantization.source_hash", "64 hexadecimal digits in lower case, got \"\"",
       [](auto& l) { l.quantization->source_hash.clear(); }},
      {"quantization.source_hash", "got \"AAAA", [](auto& l) { l.quantization->source_hash = std::string(64, 'A'); }},
      {"quantization.matrices", "finite errors of 0 or more for up, got nan and",
       [=](auto& l) { l.quantization->matrices[1].relative_rms_error = nan; }},
      {"quantization.matrices", "and -1", [](auto& l) { l.quantization->matrices[1].max_abs_error = -1; }},
      {"quantization.matrices", "the layer's int8 matrices, gate up down, got gate up",
       [](auto& l) { l.quantization->matrices.pop_back(); }},
      {"quantization.matrices", "got gate up up", [](auto& l) { l.quantization->matrices[2].role = "up"; }},
      {"quantization.matrices", "got nothing", [](auto& l) { l.quantization->matrices.clear(); }},
      {"quantization.output_relative_rms_error", "got inf",
       [](auto& l) { l.quantization->output_relative_rms_error = std::numeric_limits<double>::infinity(); }},
      {"quantization.rows", "got -1", [](auto& l) { l.quantization->rows = -1; }},
      {"quantization.seed", "got -2", [](auto& l) { l.quantization->seed = -2; }},
      {"quantization", "expected nothing, since the layer has no int8 matrix",
       [](auto& l) { l.weights = SeededFeedForwardWeights(1, l.spec, DType::kFloat32, 40, 12, false); }},
  };
  FeedForwardLayer layer;
  layer.weights = SeededFeedForwardWeights(1, layer.spec, DType::kFloat32, 40, 12, false);
  const auto good = Quantize(Arena(1), layer, kHash, {});
  ASSERT_TRUE(good.ok()) << good.status();
  for (const BadFigures& one : bad) {
    FeedForwardLayer spoilt = *good;
    one.spoil(spoilt);
    const absl::Status status = CheckLayer(spoilt).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << one.text;
    EXPECT_EQ(DetailsOf(status).field, one.field) << status;
    EXPECT_NE(std::string(status.message()).find(one.text), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace layerd
