#include "lib/reference/judge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "lib/layers/seeded.h"
#include "lib/reference/reference.h"

namespace layerd {
namespace {

// `tensor` with element `index` moved by `steps` representable values.
Tensor Moved(const Tensor& tensor, int64_t index, int steps) {
  std::vector<float> values = tensor.ToFloats();
  if (tensor.dtype() == DType::kFloat32) {
    for (int i = 0; i < std::abs(steps); ++i) {
      values[index] = std::nextafter(values[index], steps > 0 ? INFINITY : -INFINITY);
    }
  } else {
    values[index] *= 1.0f + static_cast<float>(steps) * std::ldexp(1.0f, -MantissaBits(tensor.dtype()));
  }
  return Tensor::FromFloats(tensor.dtype(), tensor.shape(), values);
}

struct NormCase {
  NormalizeSpec spec;
  NormalizeInputs inputs;
  NormalizeOutputs outputs;
};

NormCase MakeNorm(DType dtype) {
  NormCase one;
  one.spec.rounding = NormRounding::kBeforeGamma;
  one.inputs.input = SeededInput(1, dtype, {2, 16});
  one.inputs.gamma = SeededGamma(1, dtype, 16);
  const Arena arena(1);
  one.outputs = *Normalize(arena, one.spec, one.inputs, std::nullopt, false);
  return one;
}

TEST(JudgeTest, AcceptsWhatTheLayerComputes) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const NormCase one = MakeNorm(dtype);
    const ErrorReport report = JudgeNormalize(one.spec, one.inputs, one.outputs);
    EXPECT_TRUE(report.within_contract);
    EXPECT_LE(report.max_ulp_error, 0.501);
    ASSERT_EQ(report.stages.size(), 1u);
    EXPECT_EQ(report.stages[0].stage, "norm");
  }
}

TEST(JudgeTest, SeesASingleValueOfANormThatIsOneStepOff) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int steps : {-1, 1}) {
      NormCase one = MakeNorm(dtype);
      one.outputs.output = Moved(one.outputs.output, 21, steps);
      EXPECT_FALSE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract) << Name(dtype) << steps;
    }
  }
}

TEST(JudgeTest, SeesARoundingLeftOut) {
  // What AFTER_GAMMA gives, judged as BEFORE_GAMMA.
  NormCase one = MakeNorm(DType::kBFloat16);
  NormalizeSpec after = one.spec;
  after.rounding = NormRounding::kAfterGamma;
  const Arena arena(1);
  one.outputs = *Normalize(arena, after, one.inputs, std::nullopt, false);
  EXPECT_FALSE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract);
  EXPECT_TRUE(JudgeNormalize(after, one.inputs, one.outputs).within_contract);
}

// Judges `output` as the norm of one row `x`, with n rounded to 16 bits before γ.
ErrorReport JudgeRounded(NormKind kind, DType dtype, std::vector<float> x, std::vector<float> gamma,
                         std::vector<float> output, DType output_dtype, std::optional<double> epsilon = {}) {
  const int64_t n = static_cast<int64_t>(x.size());
  NormalizeSpec spec{.kind = kind, .epsilon = epsilon, .rounding = NormRounding::kBeforeGamma};
  NormalizeInputs inputs{.input = Tensor::FromFloats(dtype, {1, n}, x)};
  if (!gamma.empty()) inputs.gamma = Tensor::FromFloats(DType::kFloat32, {n}, gamma);
  NormalizeOutputs outputs;
  outputs.output = Tensor::FromFloats(output_dtype, {1, n}, output);
  return JudgeNormalize(spec, inputs, outputs);
}

TEST(JudgeTest, TheRoundingBeforeGammaIsOne) {
  // 22·r = 0.19146729104 is just above a tie of float16; float32 puts it on the tie, and from there it would go down.
  const std::vector<float> x = {22, 161};
  for (const auto& [first, right] : {std::pair(0x1.884p-3f, true), std::pair(0x1.88p-3f, false)}) {
    EXPECT_EQ(JudgeRounded(NormKind::kRmsNorm, DType::kFloat16, x, {}, {first, 0x1.66cp0f}, DType::kFloat16, 0.0)
                  .within_contract,
              right)
        << first;
  }
  // Real sizes hold many such values.
  const Arena arena(1);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      NormCase one;
      one.spec = {.kind = kind, .rounding = NormRounding::kBeforeGamma};
      one.inputs.input = SeededInput(1, dtype, {64, 4096});
      one.inputs.gamma = SeededGamma(1, dtype, 4096);
      for (const GatePosition gate : {GatePosition::kNone, GatePosition::kFirst, GatePosition::kLast}) {
        one.spec.gate_position = gate;
        if (gate != GatePosition::kNone) one.inputs.gate = SeededInput(2, dtype, {64, 4096});
        one.outputs = *Normalize(arena, one.spec, one.inputs, std::nullopt, false);
        EXPECT_TRUE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract)
            << Name(dtype) << " " << static_cast<int>(kind) << " " << static_cast<int>(gate);
      }
    }
  }
}

TEST(JudgeTest, WhereTheMeanCancelsAllValuesWithinTheDoubtAreRight) {
  const auto layer_norm = [](std::vector<float> x, float gamma, float answer, DType output) {
    const std::vector<float> gammas(x.size(), gamma), answers(x.size(), answer);
    return JudgeRounded(NormKind::kLayerNorm, DType::kBFloat16, x, gammas, answers, output);
  };
  for (const DType output : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const ErrorReport exact = layer_norm({6.90625f}, -0.4485151f, -0.0f, output);
    EXPECT_TRUE(exact.within_contract);
    EXPECT_EQ(exact.max_rel_error, 0);
    EXPECT_TRUE(layer_norm({2e26f, 2e26f}, 1, 0, output).within_contract);
    EXPECT_FALSE(layer_norm({6.90625f}, -0.4485151f, 1e-3f, output).within_contract);
  }
}

// One row of float32 as the layer computes it.
NormCase MakeRow(NormalizeSpec spec, const std::vector<float>& input, std::optional<std::vector<float>> gamma,
                 std::optional<std::vector<float>> beta, std::optional<std::vector<float>> gate) {
  const auto vector = [&](const std::optional<std::vector<float>>& values) -> std::optional<Tensor> {
    if (!values) return std::nullopt;
    return Tensor::FromFloats(DType::kFloat32, {static_cast<int64_t>(values->size())}, *values);
  };
  NormCase one;
  one.spec = spec;
  one.inputs.input = *vector(input);
  one.inputs.gamma = vector(gamma);
  one.inputs.beta = vector(beta);
  one.inputs.gate = vector(gate);
  one.outputs = *Normalize(Arena(1), one.spec, one.inputs, std::nullopt, false);
  return one;
}

TEST(JudgeTest, WhereBetaCancelsFloat64IsWhatIsLeft) {
  NormalizeSpec spec;
  spec.epsilon = 0;
  NormCase one = MakeRow(spec, {36, 1}, {{29, 29}}, {{-40.996379852f, 0}}, std::nullopt);
  EXPECT_TRUE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract);
  EXPECT_NEAR(one.outputs.output.At(0), 1.79822992e-9, 1e-14);
  one.outputs.output = Moved(one.outputs.output, 1, 1);
  EXPECT_FALSE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract);
}

TEST(JudgeTest, SquaresOfWhatAClosedGateLeftDoNotUnderflow) {
  NormalizeSpec spec;
  spec.epsilon = 0;
  spec.gate_position = GatePosition::kFirst;
  for (const float gate : {-300.0f, -374.0f, -380.0f, -700.0f}) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      spec.kind = kind;
      NormCase one = MakeRow(spec, {1, 2, 3, 4}, std::nullopt, std::nullopt, std::vector<float>(4, gate));
      EXPECT_TRUE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract) << gate;
      one.outputs.output = Moved(one.outputs.output, 0, 8);
      EXPECT_FALSE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract) << gate;
    }
  }
}

TEST(JudgeTest, AConstantRowBehindAGateHasNoVariance) {
  NormalizeSpec spec;
  spec.kind = NormKind::kLayerNorm;
  spec.epsilon = 0;
  spec.gate_position = GatePosition::kFirst;
  for (const size_t dim : {3, 7, 100}) {
    const NormCase one =
        MakeRow(spec, std::vector<float>(dim, 0.1f), std::nullopt, std::nullopt, std::vector<float>(dim, 0.7f));
    EXPECT_TRUE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract) << dim;
  }
}

TEST(JudgeTest, SeesAWrongResidualSum) {
  NormCase one = MakeNorm(DType::kFloat32);
  one.inputs.residual = one.inputs.input;
  const Arena arena(1);
  one.outputs = *Normalize(arena, one.spec, one.inputs, std::nullopt, false);
  EXPECT_TRUE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract);
  one.outputs.residual_sum = Moved(*one.outputs.residual_sum, 3, 1);
  EXPECT_FALSE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract);
}

TEST(JudgeTest, NotANumberMustComeWhereItIsDueAndNowhereElse) {
  NormCase one = MakeNorm(DType::kFloat32);
  std::vector<float> values = one.outputs.output.ToFloats();
  values[5] = std::numeric_limits<float>::quiet_NaN();
  one.outputs.output = Tensor::FromFloats(DType::kFloat32, {2, 16}, values);
  const ErrorReport report = JudgeNormalize(one.spec, one.inputs, one.outputs);
  EXPECT_FALSE(report.within_contract);
  EXPECT_TRUE(std::isinf(report.max_abs_error));

  std::vector<float> x = one.inputs.input.ToFloats();
  x[0] = std::numeric_limits<float>::quiet_NaN();  // row 0 is due to be NaN, and is not
  one.inputs.input = Tensor::FromFloats(DType::kFloat32, {2, 16}, x);
  one.outputs = MakeNorm(DType::kFloat32).outputs;
  EXPECT_FALSE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract);
  const Arena arena(1);
  one.outputs = *Normalize(arena, one.spec, one.inputs, std::nullopt, false);
  EXPECT_TRUE(JudgeNormalize(one.spec, one.inputs, one.outputs).within_contract);
}

struct FeedForwardCase {
  FeedForwardSpec spec;
  FeedForwardWeights weights;
  Tensor input;
  FeedForwardOutputs outputs;
  ErrorReport Judge() const { return JudgeFeedForward(spec, weights, input, outputs); }
};

FeedForwardCase MakeFeedForward(std::optional<DType> output_dtype = {}) {
  FeedForwardCase one;
  one.spec.inner_norm.emplace();
  one.weights = SeededFeedForwardWeights(1, one.spec, DType::kFloat32, 24, 40, true);
  one.input = SeededInput(1, DType::kFloat32, {3, 24});
  const Arena arena(1);
  one.outputs = *FeedForward(arena, one.spec, one.weights, one.input, output_dtype, true);
  return one;
}

TEST(JudgeTest, JudgesEveryStageOfAFeedForward) {
  const ErrorReport report = MakeFeedForward().Judge();
  EXPECT_TRUE(report.within_contract);
  std::vector<std::string> stages;
  for (const StageReport& stage : report.stages) stages.push_back(stage.stage);
  EXPECT_EQ(stages, (std::vector<std::string>{"gate", "up", "hidden", "inner_norm", "output"}));
  EXPECT_GT(report.max_abs_error, 0);
}

TEST(JudgeTest, ATinyActivationTimesInfinityIsInfinite) {
  for (const Activation kind :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu, Activation::kSigmoid}) {
    for (const double gate : {-25.0, -800.0, -1e5, -1e30}) {
      FeedForwardSpec spec;
      spec.activation.kind = kind;
      const double sign = kind == Activation::kSigmoid ? 1 : -1;
      EXPECT_EQ(reference::Gate(spec, gate, INFINITY), sign * INFINITY) << static_cast<int>(kind) << " " << gate;
    }
  }
  for (const Activation kind : {Activation::kRelu, Activation::kReluSquared}) {
    EXPECT_EQ(reference::Activate({kind}, -25.0), 0) << static_cast<int>(kind);
  }
}

// One value inside is off: the stage that made it is found out, and the ones after it, which really consumed it, are
// not.
TEST(JudgeTest, FindsTheStageThatIsWrong) {
  const auto spoil = [](FeedForwardOutputs& o, int stage) -> Tensor& {
    return stage == 0 ? *o.gate : stage == 1 ? *o.up : stage == 2 ? *o.hidden : stage == 3 ? *o.normed : o.output;
  };
  for (int wrong = 0; wrong < 5; ++wrong) {
    FeedForwardCase one = MakeFeedForward();
    Tensor& tensor = spoil(one.outputs, wrong);
    std::vector<float> values = tensor.ToFloats();
    values[7] = values[7] * 1.01f + 0.001f;
    tensor = Tensor::FromFloats(DType::kFloat32, tensor.shape(), values);
    const ErrorReport report = one.Judge();
    EXPECT_FALSE(report.within_contract) << wrong;
    EXPECT_GT(report.stages[wrong].max_error_over_bound, 1) << wrong;
    for (int earlier = 0; earlier < wrong; ++earlier) {
      EXPECT_LE(report.stages[earlier].max_error_over_bound, 1) << wrong;
    }
  }
}

TEST(JudgeTest, SeesANarrowOutputThatIsOneStepOff) {
  FeedForwardCase one = MakeFeedForward(DType::kBFloat16);
  EXPECT_TRUE(one.Judge().within_contract);
  one.outputs.output = Moved(one.outputs.output, 11, 2);
  EXPECT_FALSE(one.Judge().within_contract);
}

TEST(JudgeTest, NoRowsCostNothingHoweverWideTheyAre) {
  NormalizeSpec spec;
  NormalizeInputs inputs;
  inputs.input = Tensor::Allocate(DType::kFloat32, {0, 2147483647});
  const Arena arena(1);
  const auto outputs = Normalize(arena, spec, inputs, std::nullopt, false);
  ASSERT_TRUE(outputs.ok());
  EXPECT_TRUE(JudgeNormalize(spec, inputs, *outputs).within_contract);
}

TEST(JudgeTest, SwishWithBetaZeroHalvesInfinityToo) {
  FeedForwardSpec spec = ReluSpec();
  spec.activation = {Activation::kSilu, 0.0};
  FeedForwardWeights weights;
  weights.up = weights.down = Tensor::FromFloats(DType::kFloat32, {1, 1}, {1});
  const Tensor input = Tensor::FromFloats(DType::kFloat32, {3, 1}, {INFINITY, -INFINITY, 3});
  const Arena arena(1);
  const auto outputs = FeedForward(arena, spec, weights, input, std::nullopt, true);
  ASSERT_TRUE(outputs.ok());
  EXPECT_EQ(outputs->output.ToFloats(), (std::vector<float>{INFINITY, -INFINITY, 1.5f}));
  EXPECT_TRUE(JudgeFeedForward(spec, weights, input, *outputs).within_contract);
}

TEST(ReferenceTest, ActivationsHaveTheirKnownValues) {
  const auto act = [](Activation kind, double x) { return reference::Activate({kind}, x); };
  EXPECT_NEAR(act(Activation::kSilu, -90) / -7.37461e-38, 1, 1e-5);
  EXPECT_NEAR(act(Activation::kGelu, -6) / -5.919525870226207e-09, 1, 1e-12);
  EXPECT_NEAR(act(Activation::kGeluTanh, -6) / -8.43964670076231e-11, 1, 1e-12);
  EXPECT_NEAR(act(Activation::kGelu, 1), 0.8413447460685429, 1e-15);
  EXPECT_EQ(act(Activation::kReluSquared, 3), 9);
  EXPECT_EQ(act(Activation::kSigmoid, 0), 0.5);
  EXPECT_TRUE(std::isnan(act(Activation::kRelu, NAN)));
  for (const Activation kind : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu}) {
    EXPECT_EQ(act(kind, -INFINITY), 0) << static_cast<int>(kind);
    EXPECT_TRUE(std::signbit(act(kind, -INFINITY))) << static_cast<int>(kind);
    EXPECT_EQ(act(kind, INFINITY), INFINITY) << static_cast<int>(kind);
  }
}

TEST(ReferenceTest, ProductsOfBothLayoutsAreTheSame) {
  const Tensor out_in = Tensor::FromFloats(DType::kFloat32, {2, 3}, {1, 2, 3, 4, 5, 6});
  const Tensor in_out = Tensor::FromFloats(DType::kFloat32, {3, 2}, {1, 4, 2, 5, 3, 6});
  const std::vector<double> x = {1, 10, 100, -1, 0, 1};
  const Tensor bias = Tensor::FromFloats(DType::kFloat32, {2}, {0.5f, 0});
  const std::vector<double> expected = {321.5, 654, 2.5, 2};
  EXPECT_EQ(reference::Product(x, 2, out_in, WeightLayout::kOutIn, bias).value, expected);
  EXPECT_EQ(reference::Product(x, 2, in_out, WeightLayout::kInOut, bias).value, expected);
  EXPECT_EQ(reference::Product(x, 2, in_out, WeightLayout::kInOut, {}).magnitude,
            (std::vector<double>{321, 654, 4, 10}));
}

TEST(ReferenceTest, UnpacksBothPackings) {
  const Tensor halves = Tensor::FromFloats(DType::kFloat32, {4, 1}, {1, 2, 3, 4});
  const auto a = reference::Unpack(GateUpPacking::kHalves, WeightLayout::kOutIn, halves);
  EXPECT_EQ(a.gate.ToFloats(), (std::vector<float>{1, 2}));
  EXPECT_EQ(a.up.ToFloats(), (std::vector<float>{3, 4}));
  const Tensor wide = Tensor::FromFloats(DType::kFloat32, {2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  const auto b = reference::Unpack(GateUpPacking::kInterleaved, WeightLayout::kInOut, wide);
  EXPECT_EQ(b.gate.ToFloats(), (std::vector<float>{1, 3, 5, 7}));
  EXPECT_EQ(b.up.ToFloats(), (std::vector<float>{2, 4, 6, 8}));
}

}  // namespace
}  // namespace layerd
