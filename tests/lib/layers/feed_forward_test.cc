#include "lib/layers/feed_forward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "lib/base/errors.h"
#include "lib/layers/layer.h"
#include "lib/layers/seeded.h"
#include "lib/reference/judge.h"

namespace layerd {
namespace {

std::string Describe(const FeedForwardSpec& spec, DType dtype, bool biases) {
  return "form " + std::to_string(static_cast<int>(spec.form)) + " activation " +
         std::to_string(static_cast<int>(spec.activation.kind)) + " packing " +
         std::to_string(static_cast<int>(spec.packing)) + " layout " + std::to_string(static_cast<int>(spec.layout)) +
         (spec.gate_max ? " limits" : "") + (spec.inner_norm ? " inner norm" : "") + (biases ? " biases " : " ") +
         std::string(Name(dtype));
}

// One channel with weights 1: act(gate) · value.
float GateOnce(Activation activation, float gate, float value) {
  FeedForwardSpec spec;
  spec.activation = {activation};
  FeedForwardWeights weights;
  weights.gate = Tensor::FromFloats(DType::kFloat32, {1, 2}, {1, 0});
  weights.up = Tensor::FromFloats(DType::kFloat32, {1, 2}, {0, 1});
  weights.down = Tensor::FromFloats(DType::kFloat32, {1, 1}, {1});
  const Arena arena(1);
  const auto outputs =
      FeedForward(arena, spec, weights, Tensor::FromFloats(DType::kFloat32, {1, 2}, {gate, value}), {}, false);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs->output.At(0);
}

// What the texts that layerd began with say of gates.
TEST(FeedForwardTest, AClosedGateSilencesItsChannelWhateverTheValue) {
  for (const float value : {3.0f, -3.0f, 1e6f, -1e6f}) {
    EXPECT_LT(std::fabs(GateOnce(Activation::kSilu, -40.0f, value)), 1e-8f) << value;
    EXPECT_EQ(GateOnce(Activation::kRelu, -0.1f, value), 0.0f) << value;
  }
}

TEST(FeedForwardTest, AnOpenGatePassesTheValue) {
  EXPECT_EQ(GateOnce(Activation::kSigmoid, 40.0f, 3.25f), 3.25f);
  EXPECT_EQ(GateOnce(Activation::kSigmoid, 40.0f, -3.25f), -3.25f);
  EXPECT_EQ(GateOnce(Activation::kSigmoid, 0.0f, 3.0f), 1.5f);
  EXPECT_EQ(GateOnce(Activation::kIdentity, 1.0f, 3.25f), 3.25f);
}

TEST(FeedForwardTest, SiluIsTheIdentityAtOneEndAndNothingAtTheOther) {
  EXPECT_EQ(GateOnce(Activation::kSilu, 40.0f, 1.0f), 40.0f);
  EXPECT_LT(std::fabs(GateOnce(Activation::kSilu, -40.0f, 1.0f)), 1e-15f);
  EXPECT_EQ(GateOnce(Activation::kSilu, 0.0f, 1.0f), 0.0f);
}

TEST(FeedForwardTest, EveryFormKeepsTheContract) {
  const Arena arena(2);
  int judged = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
      for (const auto& [form, packing] : {std::pair(FeedForwardForm::kPlain, GateUpPacking::kSeparate),
                                          std::pair(FeedForwardForm::kGated, GateUpPacking::kSeparate),
                                          std::pair(FeedForwardForm::kGated, GateUpPacking::kHalves),
                                          std::pair(FeedForwardForm::kGated, GateUpPacking::kInterleaved)}) {
        for (int activation = 0; activation <= static_cast<int>(Activation::kSilu); ++activation) {
          for (const bool extras : {false, true}) {
            FeedForwardSpec spec;
            spec.form = form;
            spec.packing = packing;
            spec.layout = layout;
            spec.activation = {static_cast<Activation>(activation)};
            if (extras) {
              spec.inner_norm = InnerNorm{1e-5};
              if (spec.activation.kind == Activation::kSilu) spec.activation.beta = 1.5;
              if (form == FeedForwardForm::kGated) {
                spec.gate_max = 0.5;
                spec.up_limit = 0.75;
                spec.up_offset = 1;
              }
            }
            const Tensor input = SeededInput(5, dtype, {3, 20});
            const FeedForwardWeights weights = SeededFeedForwardWeights(5, spec, dtype, 20, 37, extras);
            const auto outputs = FeedForward(arena, spec, weights, input, std::nullopt, true);
            ASSERT_TRUE(outputs.ok()) << outputs.status();
            const ErrorReport report = JudgeFeedForward(spec, weights, input, *outputs);
            EXPECT_TRUE(report.within_contract) << Describe(spec, dtype, extras);
            EXPECT_LT(report.max_abs_error, dtype == DType::kFloat32 ? 2e-5 : 0.1) << Describe(spec, dtype, extras);
            ++judged;
          }
        }
      }
    }
  }
  EXPECT_EQ(judged, 3 * 2 * 4 * 8 * 2);
}

// The same numbers in another arrangement are the same layer, to the bit.
TEST(FeedForwardTest, PackingAndLayoutDoNotChangeTheBits) {
  const Arena arena(1);
  constexpr int64_t kDim = 24, kHidden = 40;
  const Tensor input = SeededInput(9, DType::kFloat32, {5, kDim});
  FeedForwardSpec spec;
  const FeedForwardWeights separate = SeededFeedForwardWeights(9, spec, DType::kFloat32, kDim, kHidden, true);
  const auto expected = FeedForward(arena, spec, separate, input, std::nullopt, false);
  ASSERT_TRUE(expected.ok());
  for (const GateUpPacking packing : {GateUpPacking::kSeparate, GateUpPacking::kHalves, GateUpPacking::kInterleaved}) {
    for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
      const auto arranged = [&](const Tensor& out_in) {  // in `layout`
        if (layout == WeightLayout::kOutIn) return out_in;
        Tensor in_out = Tensor::Allocate(DType::kFloat32, {out_in.dim(1), out_in.dim(0)});
        for (int64_t o = 0; o < out_in.dim(0); ++o) {
          for (int64_t i = 0; i < out_in.dim(1); ++i) {
            in_out.mutable_floats()[i * out_in.dim(0) + o] = out_in.At(o * out_in.dim(1) + i);
          }
        }
        return in_out;
      };
      const auto packed = [&](const Tensor& gate, const Tensor& up) {  // rows of both, as `packing` has them
        const int64_t width = gate.rank() == 2 ? gate.dim(1) : 1;
        Shape shape = gate.shape();
        shape[0] *= 2;
        Tensor both = Tensor::Allocate(DType::kFloat32, shape);
        for (int64_t h = 0; h < kHidden; ++h) {
          for (int64_t i = 0; i < width; ++i) {
            const int64_t g = packing == GateUpPacking::kHalves ? h : 2 * h;
            const int64_t u = packing == GateUpPacking::kHalves ? kHidden + h : 2 * h + 1;
            both.mutable_floats()[g * width + i] = gate.At(h * width + i);
            both.mutable_floats()[u * width + i] = up.At(h * width + i);
          }
        }
        return both;
      };
      FeedForwardSpec other = spec;
      other.packing = packing;
      other.layout = layout;
      FeedForwardWeights weights;
      if (packing == GateUpPacking::kSeparate) {
        weights.gate = arranged(*separate.gate);
        weights.up = arranged(*separate.up);
        weights.gate_bias = separate.gate_bias;
        weights.up_bias = separate.up_bias;
      } else {
        weights.gate_up = arranged(packed(*separate.gate, *separate.up));
        weights.gate_up_bias = packed(*separate.gate_bias, *separate.up_bias);
      }
      weights.down = arranged(*separate.down);
      weights.down_bias = separate.down_bias;
      const auto outputs = FeedForward(arena, other, weights, input, std::nullopt, false);
      ASSERT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_TRUE(SameBits(outputs->output, expected->output)) << Describe(other, DType::kFloat32, true);
    }
  }
}

TEST(FeedForwardTest, BFloat16WeightsGiveTheBitsOfTheFloat32LayerWithTheSameValues) {
  const Arena arena(1);
  const Tensor input = SeededInput(2, DType::kFloat32, {3, 64});
  const FeedForwardSpec spec;
  FeedForwardWeights narrow = SeededFeedForwardWeights(2, spec, DType::kBFloat16, 64, 96, false);
  FeedForwardWeights wide;
  for (const auto& [from, to] :
       {std::pair(&narrow.gate, &wide.gate), std::pair(&narrow.up, &wide.up), std::pair(&narrow.down, &wide.down)}) {
    *to = Tensor::FromFloats(DType::kFloat32, (*from)->shape(), (*from)->ToFloats());
  }
  const auto a = FeedForward(arena, spec, narrow, input, std::nullopt, false);
  const auto b = FeedForward(arena, spec, wide, input, std::nullopt, false);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_TRUE(SameBits(a->output, b->output));
}

TEST(FeedForwardTest, ARowAloneHasTheBitsItHasInABatchOfAnySizeOnAnyThreads) {
  const FeedForwardSpec spec;
  const FeedForwardWeights weights = SeededFeedForwardWeights(4, spec, DType::kFloat32, 300, 520, false);
  const Tensor batch = SeededInput(4, DType::kFloat32, {33, 300});
  const std::vector<float> all = batch.ToFloats();
  const Arena one(1);
  const auto alone = FeedForward(one, spec, weights,
                                 Tensor::FromFloats(DType::kFloat32, {1, 300}, absl::MakeConstSpan(all).first(300)),
                                 std::nullopt, false);
  ASSERT_TRUE(alone.ok());
  for (const int threads : {1, 2, 3}) {
    const Arena arena(threads);
    for (const int64_t rows : {2, 7, 16, 33}) {
      const auto outputs =
          FeedForward(arena, spec, weights,
                      Tensor::FromFloats(DType::kFloat32, {rows, 300}, absl::MakeConstSpan(all).first(rows * 300)),
                      std::nullopt, false);
      ASSERT_TRUE(outputs.ok());
      for (int i = 0; i < 300; ++i) ASSERT_EQ(outputs->output.At(i), alone->output.At(i)) << rows << " rows, " << i;
    }
  }
}

TEST(FeedForwardTest, NotANumberStaysInItsRow) {
  const Arena arena(1);
  const FeedForwardSpec spec;
  const FeedForwardWeights weights = SeededFeedForwardWeights(4, spec, DType::kFloat32, 32, 48, false);
  Tensor clean = SeededInput(4, DType::kFloat32, {4, 32});
  const auto expected = FeedForward(arena, spec, weights, clean, std::nullopt, false);
  Tensor spoiled = Tensor::FromFloats(DType::kFloat32, clean.shape(), clean.ToFloats());
  spoiled.mutable_floats()[32 + 3] = std::numeric_limits<float>::quiet_NaN();
  spoiled.mutable_floats()[96 + 3] = std::numeric_limits<float>::infinity();
  const auto outputs = FeedForward(arena, spec, weights, spoiled, std::nullopt, false);
  ASSERT_TRUE(expected.ok() && outputs.ok());
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(outputs->output.At(i), expected->output.At(i));
    EXPECT_TRUE(std::isnan(outputs->output.At(32 + i)));
    EXPECT_EQ(outputs->output.At(64 + i), expected->output.At(64 + i));
    EXPECT_FALSE(std::isfinite(outputs->output.At(96 + i)));
  }
  // A clean call after it, on the same worker's memory.
  const auto after = FeedForward(arena, spec, weights, clean, std::nullopt, false);
  EXPECT_TRUE(SameBits(after->output, expected->output));
}

TEST(FeedForwardTest, NoRowsGiveNoRows) {
  const Arena arena(1);
  const FeedForwardSpec spec;
  const FeedForwardWeights weights = SeededFeedForwardWeights(4, spec, DType::kFloat32, 8, 12, false);
  const auto outputs = FeedForward(arena, spec, weights, Tensor::Allocate(DType::kFloat32, {2, 0, 8}), {}, true);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  EXPECT_EQ(outputs->output.shape(), (Shape{2, 0, 8}));
  EXPECT_EQ(outputs->hidden->shape(), (Shape{2, 0, 12}));
}

// 70,000 rows of 1 through a hidden width of 4,096 would be 1.1 GB of hidden values: they are made in chunks.
TEST(FeedForwardTest, ChunksOfRowsGiveTheSameBitsAsRowsAlone) {
  const Arena arena(2);
  FeedForwardSpec spec = ReluSpec();
  const FeedForwardWeights weights = SeededFeedForwardWeights(6, spec, DType::kFloat32, 1, 4096, true);
  const Tensor input = SeededInput(6, DType::kFloat32, {9000, 1});
  const auto all = FeedForward(arena, spec, weights, input, std::nullopt, false);
  ASSERT_TRUE(all.ok());
  for (const int64_t row : {0, 4095, 4096, 4097, 8191, 8192, 8999}) {
    const auto alone =
        FeedForward(arena, spec, weights, Tensor::FromFloats(DType::kFloat32, {1, 1}, {input.At(row)}), {}, false);
    ASSERT_TRUE(alone.ok());
    EXPECT_EQ(all->output.At(row), alone->output.At(0)) << row;
  }
}

TEST(FeedForwardTest, IsGivenUpBetweenChunksWhenNobodyWantsItAnyMore) {
  const Arena arena(1);
  const FeedForwardSpec spec = ReluSpec();
  const FeedForwardWeights weights = SeededFeedForwardWeights(6, spec, DType::kFloat32, 1, 4096, false);
  const Tensor input = SeededInput(6, DType::kFloat32, {9000, 1});  // three chunks of 4096 rows
  int asked = 0;
  const auto outputs = FeedForward(arena, spec, weights, input, std::nullopt, false,
                                   [&] { return ++asked < 3 ? absl::OkStatus() : CancelledWhileWaiting(); });
  EXPECT_EQ(outputs.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(asked, 3);
}

struct BadCall {
  const char* name;
  const char* field;
  const char* text;  // part of it
  std::function<void(FeedForwardSpec&, FeedForwardWeights&, Tensor&)> spoil;
};

TEST(FeedForwardTest, WhatDoesNotFitIsRefusedByField) {
  const Tensor small = Tensor::Allocate(DType::kFloat32, {3});
  const std::vector<BadCall> bad = {
      {"scalar", "input.shape", "got []",
       [](auto&, auto&, auto& x) { x = Tensor::FromFloats(DType::kFloat32, {}, {1}); }},
      {"empty row", "input.shape", "got [2, 0]",
       [](auto&, auto&, auto& x) {
         x = Tensor::Allocate(DType::kFloat32, {2, 0});
       }},
      {"input of another width", "weights.gate.shape", "expected [h, d = 9] for layout OUT_IN, got [12, 8]",
       [](auto&, auto&, auto& x) {
         x = Tensor::Allocate(DType::kFloat32, {2, 9});
       }},
      {"int8 input", "input.dtype", "expected float32, float16 or bfloat16, got int8",
       [](auto&, auto&, auto& x) {
         x = Tensor::Allocate(DType::kInt8, {2, 8});
       }},
      {"int8 bias", "weights.up_bias.dtype", "got int8",
       [](auto&, auto& w, auto&) { w.up_bias = Tensor::Allocate(DType::kInt8, {12}); }},
      {"no gate", "weights.gate", "the packing SEPARATE", [](auto&, auto& w, auto&) { w.gate.reset(); }},
      {"no up", "weights.up", "expected a tensor", [](auto&, auto& w, auto&) { w.up.reset(); }},
      {"no down", "weights.down", "expected a tensor", [](auto&, auto& w, auto&) { w.down.reset(); }},
      {"two sources", "weights.gate_up", "expected nothing", [](auto&, auto& w, auto&) { w.gate_up = w.gate; }},
      {"up of another width", "weights.up.shape", "h of weights.gate = 12",
       [](auto&, auto& w, auto&) {
         w.up = Tensor::Allocate(DType::kFloat32, {11, 8});
       }},
      {"down of another width", "weights.down.shape", "expected [d_out, h of weights.gate = 12]",
       [](auto&, auto& w, auto&) {
         w.down = Tensor::Allocate(DType::kFloat32, {8, 11});
       }},
      {"down with no outputs", "weights.down.shape", "got [0, 12]",
       [](auto&, auto& w, auto&) {
         w.down = Tensor::Allocate(DType::kFloat32, {0, 12});
       }},
      {"wrong layout", "weights.gate.shape", "layout IN_OUT",
       [](auto& s, auto&, auto&) { s.layout = WeightLayout::kInOut; }},
      {"matrix of three axes", "weights.down.shape", "got [8, 12, 1]",
       [](auto&, auto& w, auto&) {
         w.down = w.down->Reshaped({8, 12, 1});
       }},
      {"odd gate_up", "weights.gate_up.shape", "an even number of outputs",
       [](auto& s, auto& w, auto&) {
         s.packing = GateUpPacking::kHalves;
         w.gate.reset();
         w.up.reset();
         w.gate_up = Tensor::Allocate(DType::kFloat32, {23, 8});
       }},
      {"gate bias of another width", "weights.gate_bias.shape", "expected [h = 12], got [3]",
       [=](auto&, auto& w, auto&) { w.gate_bias = small; }},
      {"up bias of another width", "weights.up_bias.shape", "[h = 12]",
       [=](auto&, auto& w, auto&) { w.up_bias = small; }},
      {"down bias of another width", "weights.down_bias.shape", "[d_out = 8]",
       [=](auto&, auto& w, auto&) { w.down_bias = small; }},
      {"bias of the packed matrix", "weights.gate_up_bias", "expected nothing",
       [=](auto&, auto& w, auto&) { w.gate_up_bias = small; }},
      {"gamma without inner norm", "weights.inner_norm_gamma", "spec.inner_norm is not set",
       [=](auto&, auto& w, auto&) { w.inner_norm_gamma = small; }},
      {"gamma of another width", "weights.inner_norm_gamma.shape", "[h = 12]",
       [=](auto& s, auto& w, auto&) {
         s.inner_norm.emplace();
         w.inner_norm_gamma = small;
       }},
      {"inner epsilon", "spec.inner_norm.epsilon", "got -1",
       [](auto& s, auto&, auto&) { s.inner_norm = InnerNorm{-1.0}; }},
      {"limit of zero", "spec.gate_max", "above 0, got 0", [](auto& s, auto&, auto&) { s.gate_max = 0; }},
      {"limit of NaN", "spec.up_limit", "got nan", [](auto& s, auto&, auto&) { s.up_limit = NAN; }},
      {"limit below float32", "spec.up_limit", "got 1e-300", [](auto& s, auto&, auto&) { s.up_limit = 1e-300; }},
      {"offset beyond float32", "spec.up_offset", "got -1e+300", [](auto& s, auto&, auto&) { s.up_offset = -1e300; }},
      {"infinite offset", "spec.up_offset", "got inf", [](auto& s, auto&, auto&) { s.up_offset = INFINITY; }},
      {"infinite beta", "spec.swish_beta", "got inf", [](auto& s, auto&, auto&) { s.activation.beta = INFINITY; }},
      {"beta of another activation", "spec.swish_beta", "not SILU",
       [](auto& s, auto&, auto&) {
         s.activation = {Activation::kRelu, 2.0};
       }},
      {"packing of the plain form", "spec.packing", "the plain form has no gate",
       [](auto& s, auto&, auto&) {
         s.form = FeedForwardForm::kPlain;
         s.packing = GateUpPacking::kHalves;
       }},
      {"limit of the plain form", "spec.gate_max", "the plain form has no gate",
       [](auto& s, auto&, auto&) {
         s.form = FeedForwardForm::kPlain;
         s.gate_max = 7;
       }},
      {"gate of the plain form", "weights.gate", "the form is PLAIN",
       [](auto& s, auto&, auto&) { s.form = FeedForwardForm::kPlain; }},
  };
  for (const BadCall& one : bad) {
    FeedForwardSpec spec;
    FeedForwardWeights weights = SeededFeedForwardWeights(1, spec, DType::kFloat32, 8, 12, false);
    Tensor input = SeededInput(1, DType::kFloat32, {2, 8});
    ASSERT_TRUE(CheckFeedForward(spec, weights, input).ok());
    one.spoil(spec, weights, input);
    const absl::Status status = CheckFeedForward(spec, weights, input).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << one.name;
    EXPECT_EQ(DetailsOf(status).field, one.field) << one.name << ": " << status;
    EXPECT_NE(std::string(status.message()).find(one.text), std::string::npos) << one.name << ": " << status;
  }
}

TEST(FeedForwardTest, AnswersInFloatsOnly) {
  const FeedForwardSpec spec;
  const FeedForwardWeights weights = SeededFeedForwardWeights(1, spec, DType::kFloat32, 8, 12, false);
  const Tensor input = SeededInput(1, DType::kFloat32, {2, 8});
  const absl::Status status = FeedForward(Arena(1), spec, weights, input, DType::kInt8, false).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailsOf(status).field, "output_dtype");
  EXPECT_EQ(status.message(), "output_dtype: expected float32, float16 or bfloat16, got int8");
}

// A layer that is kept comes without an input, so its first matrix tells d.
TEST(FeedForwardTest, ALayerWhoseFirstMatrixIsNoneIsToldSoWithoutASizeOfItsOwnMaking) {
  FeedForwardLayer layer;
  layer.weights = SeededFeedForwardWeights(1, layer.spec, DType::kFloat32, 8, 12, false);
  ASSERT_TRUE(CheckLayer(layer).ok());
  layer.weights.gate = Tensor::Allocate(DType::kFloat32, {96});
  EXPECT_EQ(CheckLayer(layer).status().message(), "weights.gate.shape: expected a matrix, got [96]");
}

}  // namespace
}  // namespace layerd
