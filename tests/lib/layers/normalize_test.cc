#include "lib/layers/normalize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/layers/seeded.h"
#include "lib/reference/judge.h"

namespace layerd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

NormalizeInputs InputOf(Tensor x) {
  NormalizeInputs inputs;
  inputs.input = std::move(x);
  return inputs;
}

Tensor Row(std::vector<float> values, DType dtype = DType::kFloat32) {
  return Tensor::FromFloats(dtype, {1, static_cast<int64_t>(values.size())}, values);
}

NormalizeSpec SpecOf(NormKind kind, std::optional<double> epsilon = {}) {
  NormalizeSpec spec;
  spec.kind = kind;
  spec.epsilon = epsilon;
  return spec;
}

std::vector<float> Compute(const NormalizeSpec& spec, const NormalizeInputs& inputs) {
  const Arena arena(1);
  const auto outputs = Normalize(arena, spec, inputs, std::nullopt, false);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? outputs->output.ToFloats() : std::vector<float>();
}

std::vector<float> Scaled(std::vector<float> x, float factor, float summand) {
  for (float& v : x) v = v * factor + summand;
  return x;
}

// What the texts that layerd began with say of the two norms, exactly.
TEST(NormalizeTest, BothNormsAreUnchangedByDoublingWithEpsilonZero) {
  const std::vector<float> x = {0.5f, -1.5f, 2.0f, 1.0f};
  for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
    const NormalizeSpec spec = SpecOf(kind, 0.0);
    EXPECT_EQ(Compute(spec, InputOf(Row(x))), Compute(spec, InputOf(Row(Scaled(x, 2, 0)))));
  }
}

TEST(NormalizeTest, OnlyLayerNormIsUnchangedByAddingTwo) {
  const std::vector<float> x = {0.5f, -1.5f, 2.0f, 1.0f};
  const NormalizeSpec layer = SpecOf(NormKind::kLayerNorm, 0.0), rms = SpecOf(NormKind::kRmsNorm, 0.0);
  EXPECT_EQ(Compute(layer, InputOf(Row(x))), Compute(layer, InputOf(Row(Scaled(x, 1, 2)))));
  const auto before = Compute(rms, InputOf(Row(x))), after = Compute(rms, InputOf(Row(Scaled(x, 1, 2))));
  for (size_t i = 0; i < x.size(); ++i) EXPECT_GT(std::fabs(before[i] - after[i]), 0.03f) << i;
}

TEST(NormalizeTest, EpsilonLeftOutIsTheDefaultAndZeroIsZero) {
  const Tensor zeros = Row({0, 0, 0, 0});
  EXPECT_EQ(EpsilonOf(SpecOf(NormKind::kRmsNorm)), 1e-6);
  EXPECT_EQ(EpsilonOf(SpecOf(NormKind::kLayerNorm)), 1e-5);
  EXPECT_EQ(EpsilonOf(SpecOf(NormKind::kRmsNorm, 0.0)), 0.0);
  EXPECT_EQ(Compute(SpecOf(NormKind::kRmsNorm, 0.0), InputOf(zeros)), std::vector<float>(4, 0.0f));
  EXPECT_EQ(Compute(SpecOf(NormKind::kLayerNorm, 0.0), InputOf(Row({3, 3, 3, 3}))), std::vector<float>(4, 0.0f));
}

TEST(NormalizeTest, SeveralLastAxesAreNormalisedTogether) {
  const Tensor x = SeededInput(3, DType::kFloat32, {2, 3, 4});
  NormalizeSpec spec = SpecOf(NormKind::kLayerNorm);
  spec.normalized_axes = 2;
  const auto together = Compute(spec, InputOf(x));
  spec.normalized_axes = 1;
  EXPECT_EQ(together, Compute(spec, InputOf(x.Reshaped({2, 12}))));
}

TEST(NormalizeTest, GammaMayHaveTheNormalisedShapeOrBeFlat) {
  NormalizeInputs inputs = InputOf(SeededInput(3, DType::kFloat32, {2, 3, 4}));
  NormalizeSpec spec = SpecOf(NormKind::kRmsNorm);
  spec.normalized_axes = 2;
  inputs.gamma = SeededGamma(1, DType::kBFloat16, 12);
  const auto flat = Compute(spec, inputs);
  inputs.gamma = inputs.gamma->Reshaped({3, 4});
  EXPECT_EQ(flat, Compute(spec, inputs));
}

TEST(NormalizeTest, StatisticsAreAnsweredOnRequest) {
  const Arena arena(1);
  NormalizeSpec spec = SpecOf(NormKind::kLayerNorm, 0.0);
  spec.group_size = 2;
  const auto outputs = Normalize(arena, spec, InputOf(Row({1, 3, 10, 10})), std::nullopt, true);
  ASSERT_TRUE(outputs.ok());
  EXPECT_EQ(outputs->mean->shape(), (Shape{1, 2}));
  EXPECT_EQ(outputs->mean->ToFloats(), (std::vector<float>{2, 10}));
  EXPECT_EQ(outputs->inverse_rms->ToFloats(), (std::vector<float>{1, 0}));
}

TEST(NormalizeTest, NoRowsGiveNoRows) {
  const Arena arena(1);
  NormalizeInputs inputs = InputOf(Tensor::Allocate(DType::kFloat16, {0, 8}));
  inputs.residual = inputs.input;
  const auto outputs = Normalize(arena, SpecOf(NormKind::kRmsNorm), inputs, DType::kFloat32, true);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  EXPECT_EQ(outputs->output.shape(), (Shape{0, 8}));
  EXPECT_EQ(outputs->output.dtype(), DType::kFloat32);
  EXPECT_EQ(outputs->residual_sum->num_elements(), 0);
}

// Every combination of the options keeps the contract on every dtype.
TEST(NormalizeTest, EveryCombinationOfOptionsKeepsTheContract) {
  const Arena arena(2);
  int judged = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType output_dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
        for (const NormRounding rounding : {NormRounding::kBeforeGamma, NormRounding::kAfterGamma}) {
          for (const GatePosition gate : {GatePosition::kNone, GatePosition::kFirst, GatePosition::kLast}) {
            for (const int64_t group_size : {0, 16}) {
              for (const bool with_extras : {false, true}) {
                NormalizeSpec spec = SpecOf(kind);
                spec.rounding = rounding;
                spec.gate_position = gate;
                spec.group_size = group_size;
                NormalizeInputs inputs = InputOf(SeededInput(7, dtype, {3, 48}));
                inputs.gamma = SeededGamma(7, DType::kFloat16, 48);
                if (gate != GatePosition::kNone) inputs.gate = SeededTensor(7, "gate", dtype, {3, 48}, 2.0);
                if (with_extras) {
                  spec.gamma_offset = 1;
                  inputs.beta = SeededBeta(7, DType::kFloat32, 48);
                  inputs.residual = SeededTensor(7, "residual", dtype, {3, 48}, 1.0);
                }
                const auto outputs = Normalize(arena, spec, inputs, output_dtype, false);
                ASSERT_TRUE(outputs.ok()) << outputs.status();
                const ErrorReport report = JudgeNormalize(spec, inputs, *outputs);
                EXPECT_TRUE(report.within_contract)
                    << Name(dtype) << " to " << Name(output_dtype) << " kind " << static_cast<int>(kind) << " gate "
                    << static_cast<int>(gate) << " group " << group_size << " extras " << with_extras << ": "
                    << report.max_ulp_error << " ulp";
                ++judged;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(judged, 3 * 3 * 2 * 2 * 3 * 2 * 2);
}

TEST(NormalizeTest, ARowAloneHasTheBitsItHasInABatchOfAnySizeOnAnyThreads) {
  const Tensor batch = SeededInput(11, DType::kBFloat16, {64, 300});
  NormalizeSpec spec = SpecOf(NormKind::kLayerNorm);
  const std::vector<float> all = batch.ToFloats();
  const auto alone = Compute(
      spec, InputOf(Tensor::FromFloats(DType::kBFloat16, {1, 300}, absl::MakeConstSpan(all).subspan(300 * 5, 300))));
  for (const int threads : {1, 2, 3}) {
    const Arena arena(threads);
    const auto outputs = Normalize(arena, spec, InputOf(batch), std::nullopt, false);
    ASSERT_TRUE(outputs.ok());
    for (int i = 0; i < 300; ++i) EXPECT_EQ(outputs->output.At(300 * 5 + i), alone[i]);
  }
}

// Outputs that are larger than the caches are written another way, and few long rows are divided another way.
TEST(NormalizeTest, LargeCallsHaveTheBitsOfSmallOnes) {
  constexpr int64_t kElements = 4300800;  // 16.4 MiB
  std::vector<float> values(kElements);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(static_cast<int32_t>(i * 2654435761u)) * 1e-9f;
  ASSERT_TRUE(IsWorthStreaming(kElements * 4));
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    for (const int64_t dim : {1050, 1433600}) {
      const Tensor x = Tensor::FromFloats(DType::kFloat32, {kElements / dim, dim}, values);
      NormalizeInputs inputs = InputOf(x);
      inputs.gamma = Tensor::FromFloats(DType::kFloat32, {dim}, absl::MakeConstSpan(values).first(dim));
      for (const int threads : {1, 2}) {
        const Arena arena(threads);
        const auto all = Normalize(arena, SpecOf(kind), inputs, std::nullopt, true);
        ASSERT_TRUE(all.ok()) << all.status();
        for (const int64_t row : {int64_t{0}, x.dim(0) / 2, x.dim(0) - 1}) {
          NormalizeInputs one = inputs;
          one.input =
              Tensor::FromFloats(DType::kFloat32, {1, dim}, absl::MakeConstSpan(values).subspan(row * dim, dim));
          const auto alone = Normalize(Arena(1), SpecOf(kind), one, std::nullopt, true);
          ASSERT_TRUE(alone.ok()) << alone.status();
          EXPECT_EQ(std::memcmp(all->output.floats() + row * dim, alone->output.floats(), alone->output.num_bytes()),
                    0);
          EXPECT_EQ(all->inverse_rms->At(row), alone->inverse_rms->At(0));
        }
      }
    }
  }
}

struct BadCall {
  const char* name;
  const char* field;
  const char* text;  // part of it
  std::function<void(NormalizeSpec&, NormalizeInputs&)> spoil;
};

// The same bytes in pieces of random lengths, as they come off the wire.
Tensor Scattered(const Tensor& tensor, uint64_t seed, size_t longest) {
  auto bytes = std::make_shared<std::vector<std::byte>>(tensor.bytes().begin(), tensor.bytes().end());
  std::mt19937_64 random(seed);
  std::vector<absl::Span<const std::byte>> pieces;
  for (size_t at = 0; at < bytes->size();) {
    const size_t count = std::min<size_t>(bytes->size() - at, 1 + random() % longest);
    pieces.push_back(absl::MakeConstSpan(*bytes).subspan(at, count));
    at += count;
  }
  return *Tensor::AdoptPieces(tensor.dtype(), tensor.shape(), bytes, std::move(pieces));
}

TEST(NormalizeTest, ScatteredOperandsHaveTheBitsOfOnesInOnePiece) {
  const Arena arena(2);
  // Rows that fill several blocks, one that is too long to be gathered alone, and rows of a few bytes.
  for (const Shape& shape : {Shape{37, 4096}, Shape{3, 100000}, Shape{1000, 3}, Shape{0, 5}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const size_t longest : {size_t{7}, size_t{100000}}) {
        if (longest == 7 && shape[1] > 5000) continue;  // it takes long
        NormalizeSpec spec = SpecOf(NormKind::kLayerNorm);
        spec.rounding = NormRounding::kAfterGamma;
        spec.gate_position = GatePosition::kLast;
        NormalizeInputs inputs;
        inputs.input = SeededInput(1, dtype, shape);
        inputs.residual = SeededInput(2, dtype, shape);
        inputs.gate = SeededInput(3, dtype, shape);
        const auto want = Normalize(arena, spec, inputs, std::nullopt, true);
        ASSERT_TRUE(want.ok()) << want.status();
        inputs.input = Scattered(inputs.input, 4, longest);
        for (const bool all : {false, true}) {
          if (all) {
            inputs.residual = Scattered(*inputs.residual, 5, longest);
            inputs.gate = Scattered(*inputs.gate, 6, longest);
          }
          const auto got = Normalize(arena, spec, inputs, std::nullopt, true);
          ASSERT_TRUE(got.ok()) << got.status();
          EXPECT_TRUE(SameBits(got->output, want->output)) << ToString(shape);
          EXPECT_TRUE(SameBits(*got->residual_sum, *want->residual_sum));
          EXPECT_TRUE(SameBits(*got->inverse_rms, *want->inverse_rms));
          EXPECT_TRUE(SameBits(*got->mean, *want->mean));
        }
      }
    }
  }
}

TEST(NormalizeTest, WhatDoesNotFitIsRefusedByField) {
  const double kNaN = std::numeric_limits<double>::quiet_NaN();
  const std::vector<BadCall> bad = {
      {"scalar", "input.shape", "got [] (a scalar)",
       [](auto&, auto& i) { i.input = Tensor::FromFloats(DType::kFloat32, {}, {1}); }},
      {"empty row", "input.shape", "got [4, 0]",
       [](auto&, auto& i) {
         i.input = Tensor::Allocate(DType::kFloat32, {4, 0});
       }},
      {"negative epsilon", "spec.epsilon", "got -1e-06", [](auto& s, auto&) { s.epsilon = -1e-6; }},
      {"NaN epsilon", "spec.epsilon", "got nan", [=](auto& s, auto&) { s.epsilon = kNaN; }},
      {"infinite epsilon", "spec.epsilon", "got inf", [](auto& s, auto&) { s.epsilon = kInfinity; }},
      {"no axes", "spec.normalized_axes", "expected 1 to 2", [](auto& s, auto&) { s.normalized_axes = 0; }},
      {"too many axes", "spec.normalized_axes", "got 3", [](auto& s, auto&) { s.normalized_axes = 3; }},
      {"group that does not divide", "spec.group_size", "a divisor of 8", [](auto& s, auto&) { s.group_size = 3; }},
      {"negative group", "spec.group_size", "got -4", [](auto& s, auto&) { s.group_size = -4; }},
      {"gamma of another width", "gamma.shape", "expected [8] to fit input.shape, got [7]",
       [](auto&, auto& i) { i.gamma = SeededGamma(1, DType::kFloat32, 7); }},
      {"beta of another width", "beta.shape", "got [1, 8]",
       [](auto&, auto& i) {
         i.beta = SeededBeta(1, DType::kFloat32, 8).Reshaped({1, 8});
       }},
      {"rounding not said", "spec.rounding", "BEFORE_GAMMA or AFTER_GAMMA",
       [](auto&, auto& i) {
         i.input = SeededInput(1, DType::kBFloat16, {2, 8});
         i.gamma = SeededGamma(1, DType::kBFloat16, 8);
       }},
      {"offset without gamma", "gamma", "gamma_offset is 1", [](auto& s, auto&) { s.gamma_offset = 1; }},
      {"NaN offset", "spec.gamma_offset", "got nan", [=](auto& s, auto&) { s.gamma_offset = kNaN; }},
      {"int8 input", "input.dtype", "expected float32, float16 or bfloat16, got int8",
       [](auto&, auto& i) {
         i.input = Tensor::Allocate(DType::kInt8, {2, 8});
       }},
      {"int8 gamma", "gamma.dtype", "got int8", [](auto&, auto& i) { i.gamma = Tensor::Allocate(DType::kInt8, {8}); }},
      {"int8 beta", "beta.dtype", "got int8", [](auto&, auto& i) { i.beta = Tensor::Allocate(DType::kInt8, {8}); }},
      {"int8 residual", "residual.dtype", "got int8",
       [](auto&, auto& i) {
         i.residual = Tensor::Allocate(DType::kInt8, {2, 8});
       }},
      {"residual of another dtype", "residual.dtype", "expected the input's dtype float32, got float16",
       [](auto&, auto& i) {
         i.residual = SeededInput(1, DType::kFloat16, {2, 8});
       }},
      {"residual of another shape", "residual.shape", "got [8, 2]",
       [](auto&, auto& i) {
         i.residual = SeededInput(1, DType::kFloat32, {8, 2});
       }},
      {"gate without a position", "gate", "FIRST or LAST", [](auto&, auto& i) { i.gate = i.input; }},
      {"position without a gate", "gate", "expected a gate",
       [](auto& s, auto&) { s.gate_position = GatePosition::kLast; }},
  };
  for (const BadCall& one : bad) {
    NormalizeSpec spec = SpecOf(NormKind::kRmsNorm);
    NormalizeInputs inputs = InputOf(SeededInput(1, DType::kFloat32, {2, 8}));
    ASSERT_TRUE(CheckNormalize(spec, inputs).ok());
    one.spoil(spec, inputs);
    const absl::Status status = CheckNormalize(spec, inputs).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << one.name;
    EXPECT_EQ(DetailsOf(status).field, one.field) << one.name;
    EXPECT_NE(std::string(status.message()).find(one.text), std::string::npos) << one.name << ": " << status;
  }
}

TEST(NormalizeTest, AnswersInFloatsOnly) {
  const NormalizeInputs inputs = InputOf(SeededInput(1, DType::kFloat32, {2, 8}));
  const absl::Status status = Normalize(Arena(1), SpecOf(NormKind::kRmsNorm), inputs, DType::kInt8, false).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailsOf(status).field, "output_dtype");
  EXPECT_EQ(status.message(), "output_dtype: expected float32, float16 or bfloat16, got int8");
}

}  // namespace
}  // namespace layerd
