#include "lib/kernels/activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "lib/kernels/activation_internal.h"
#include "tests/lib/kernels/kernel_testing.h"

namespace layerd {
namespace {

using ::testing::FloatEq;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

// Correct rounding is 0.5; what float64 inside loses on the way is below a millionth of a unit (N5 allows 2).
constexpr long double kUlpBudget = 0.50001L;

struct NamedActivation {
  const char* name;
  ActivationFunction act;
};
const NamedActivation kActivations[] = {
    {"identity", {Activation::kIdentity}},
    {"sigmoid", {Activation::kSigmoid}},
    {"relu", {Activation::kRelu}},
    {"relu_squared", {Activation::kReluSquared}},
    {"gelu", {Activation::kGelu}},
    {"gelu_tanh", {Activation::kGeluTanh}},
    {"quick_gelu", {Activation::kQuickGelu}},
    {"silu", {Activation::kSilu}},
    {"silu_beta_0", {Activation::kSilu, 0.0}},
    {"silu_beta_minus_1_5", {Activation::kSilu, -1.5}},
    {"silu_beta_1000", {Activation::kSilu, 1000.0}},
};

// x·σ(y) in long double, with the limit where x·0 would be NaN.
long double TimesSigma(long double x, long double y) {
  if (std::isinf(y) && y < 0) return std::copysign(0.0L, x);
  return x / (1.0L + std::exp(-y));
}

// The formulas of activation.h as they are written there, in long double and by the library's exp and erfc.
long double Reference(const ActivationFunction& act, long double x) {
  switch (act.kind) {
    case Activation::kIdentity:
      return x;
    case Activation::kSigmoid:
      return TimesSigma(1.0L, x);
    case Activation::kRelu:
      return std::isnan(x) || x > 0 ? x : 0.0L;
    case Activation::kReluSquared:
      return std::isnan(x) || x > 0 ? x * x : 0.0L;
    case Activation::kGelu:
      if (std::isinf(x) && x < 0) return -0.0L;
      return x * (0.5L * std::erfc(-x / std::sqrt(2.0L)));
    case Activation::kGeluTanh: {
      const long double root = std::sqrt(2.0L / 3.14159265358979323846264338327950288L);
      return TimesSigma(x, 2.0L * root * (x + 0.044715L * x * x * x));
    }
    case Activation::kQuickGelu:
      return TimesSigma(x, 1.702L * x);
    case Activation::kSilu:
      return act.beta == 0 ? 0.5L * x : TimesSigma(x, static_cast<long double>(act.beta) * x);
  }
  return x;
}

std::vector<float> Apply(const ActivationFunction& act, const std::vector<float>& in) {
  std::vector<float> out(in.size());
  ApplyActivation(act, in.data(), out.data(), static_cast<int64_t>(in.size()));
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Bit patterns at a stride through all of float32 (NaNs, infinities and denormals among them), and evenly spaced values
// where the functions bend and where their tails end.
std::vector<float> Sweep() {
  std::vector<float> in = {0.0f, -0.0f, kInf, -kInf, kNan, -kNan, kLargest, -kLargest, 1e-45f, -1e-45f};
  constexpr uint32_t kStride = kSanitized ? 262'147 : 4'093;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStride) {
    in.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  constexpr int kPoints = kSanitized ? 20'000 : 200'000;
  for (const float reach : {1.0f, 20.0f, 110.0f}) {
    for (int i = -kPoints; i <= kPoints; ++i) in.push_back(reach * static_cast<float>(i) / kPoints);
  }
  return in;
}

class EachActivation : public ::testing::TestWithParam<NamedActivation> {};
INSTANTIATE_TEST_SUITE_P(All, EachActivation, ::testing::ValuesIn(kActivations),
                         [](const auto& each) { return std::string(each.param.name); });

TEST_P(EachActivation, IsCorrectlyRoundedOverAllOfFloat32AndTheSameOnEveryTarget) {
  const ActivationFunction& act = GetParam().act;
  const std::vector<float> in = Sweep();
  const std::vector<float> out = Apply(act, in);
  long double worst = 0;
  float worst_at = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    const long double want = Reference(act, in[i]);
    const long double error = UlpError(DType::kFloat32, out[i], want);
    if (error > worst) {
      worst = error;
      worst_at = in[i];
    }
    if (!std::isnan(want)) {
      ASSERT_EQ(std::signbit(out[i]), std::signbit(want)) << in[i];
    }
  }
  EXPECT_LE(worst, kUlpBudget) << "at " << worst_at;
  RecordProperty("max_ulp", std::to_string(worst));
  ForEachSimd([&](Simd) { EXPECT_TRUE(SameBits(Apply(act, in), out)); });
}

// Rounding to float32 would hide nearly every difference of a last bit in float64: this is the test that sees them.
TEST_P(EachActivation, HasTheSameFloat64BitsOnEveryTarget) {
  const std::vector<float> in = Sweep();
  const int64_t n = static_cast<int64_t>(in.size());
  std::vector<double> want(in.size()), got(in.size());
  ActivateFloat64(GetParam().act, in.data(), want.data(), n);
  ForEachSimd([&](Simd) {
    ActivateFloat64(GetParam().act, in.data(), got.data(), n);
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(double)), 0);
  });
}

TEST_P(EachActivation, TakesAnyLengthAlignmentAndWorksInPlace) {
  const ActivationFunction& act = GetParam().act;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 4.0f);
  ForEachSimd([&](Simd) {
    for (size_t n = 0; n <= 2 * 16 + 1; ++n) {
      for (size_t shift = 0; shift < 4; ++shift) {
        std::vector<float> data(shift + n + 1, 42.0f);
        for (size_t i = 0; i < n; ++i) data[shift + i] = normal(random);
        std::vector<float> expected = data;
        for (size_t i = 0; i < n; ++i) ApplyActivation(act, &data[shift + i], &expected[shift + i], 1);
        ApplyActivation(act, data.data() + shift, data.data() + shift, static_cast<int64_t>(n));
        EXPECT_TRUE(SameBits(data, expected)) << n << " from " << shift;
      }
    }
  });
}

TEST_P(EachActivation, GivesNanForNanAlone) {
  ForEachSimd([&](Simd) {
    std::vector<float> in(40, 1.0f);
    in[5] = kNan;
    in[38] = -kNan;
    const std::vector<float> out = Apply(GetParam().act, in);
    for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i == 5 || i == 38) << i;
  });
}

TEST_P(EachActivation, MultipliesWithUpAndRoundsOnce) {
  const Gating gating = {.activation = GetParam().act};
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0.0f, 5.0f);
  std::vector<float> gate(3000), up(3000), out(3000);
  for (float& value : gate) value = normal(random);
  for (float& value : up) value = normal(random) * 1e3f;
  ApplyGating(gating, gate.data(), up.data(), out.data(), 3000);
  for (size_t i = 0; i < out.size(); ++i) {
    const long double want = Reference(gating.activation, gate[i]) * up[i];
    ASSERT_LE(UlpError(DType::kFloat32, out[i], want), kUlpBudget) << gate[i] << " " << up[i];
  }
  ForEachSimd([&](Simd) {
    std::vector<float> again(out.size());
    ApplyGating(gating, gate.data(), up.data(), again.data(), 3000);
    EXPECT_TRUE(SameBits(again, out));
  });
}

float One(const ActivationFunction& act, float x) { return Apply(act, {x})[0]; }

TEST(ApplyActivation, GivesPinnedTails) {
  ForEachSimd([](Simd) {
    EXPECT_THAT(One({Activation::kSilu}, -90.0f), FloatEq(-7.37461e-38f)) << "not cancelled";
    EXPECT_NEAR(One({Activation::kGeluTanh}, -5.0f), -2.2917961966295044e-07, 2.3e-13);
    EXPECT_NEAR(One({Activation::kGeluTanh}, -6.0f), -8.43964670076231e-11, 8.4e-17);
    EXPECT_NEAR(One({Activation::kGelu}, -5.0f), -1.4332578593959731e-06, 1.4e-12);
    EXPECT_NEAR(One({Activation::kGelu}, -6.0f), -5.919525870226207e-09, 5.9e-15);
    EXPECT_EQ(One({Activation::kGeluTanh}, -100.0f), 0.0f);
    EXPECT_EQ(One({Activation::kGeluTanh}, -1500.0f), 0.0f);
  });
}

TEST(ApplyActivation, TakesLimitsAtTheEnds) {
  ForEachSimd([](Simd) {
    for (const Activation kind :
         {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu}) {
      for (const float low : {-kInf, -kLargest}) {
        EXPECT_EQ(One({kind}, low), 0.0f);
        EXPECT_TRUE(std::signbit(One({kind}, low)));
      }
      EXPECT_EQ(One({kind}, kInf), kInf);
      EXPECT_EQ(One({kind}, kLargest), kLargest);
    }
    EXPECT_EQ(One({Activation::kSigmoid}, -kInf), 0.0f);
    EXPECT_EQ(One({Activation::kSigmoid}, kInf), 1.0f);
    EXPECT_EQ(One({Activation::kRelu}, -kInf), 0.0f);
    EXPECT_EQ(One({Activation::kReluSquared}, kInf), kInf);
    EXPECT_EQ(One({Activation::kReluSquared}, kLargest), kInf);
  });
}

TEST(ApplyActivation, TakesLimitsOfSiluWithNegativeAndZeroBeta) {
  ForEachSimd([](Simd) {
    EXPECT_EQ(One({Activation::kSilu, -2.0}, kInf), 0.0f);
    EXPECT_FALSE(std::signbit(One({Activation::kSilu, -2.0}, kInf)));
    EXPECT_EQ(One({Activation::kSilu, -2.0}, -kInf), -kInf);
    EXPECT_EQ(One({Activation::kSilu, 0.0}, kInf), kInf);
    EXPECT_EQ(One({Activation::kSilu, 0.0}, -kInf), -kInf);
    EXPECT_EQ(One({Activation::kSilu, 0.0}, 3.0f), 1.5f);
    EXPECT_EQ(One({Activation::kSilu, 1e300}, -kLargest), 0.0f);
    EXPECT_EQ(One({Activation::kSilu, 1e300}, 2.0f), 2.0f);
  });
}

TEST(ApplyActivation, ReluKeepsNan) {
  ForEachSimd([](Simd) {
    const std::vector<float> out = Apply({Activation::kRelu}, {kNan, -1.0f, -0.0f, 2.0f});
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_EQ(out[1], 0.0f);
    EXPECT_EQ(out[2], 0.0f);
    EXPECT_EQ(out[3], 2.0f);
  });
}

struct GatingCase {
  const char* name;
  Gating gating;
};
const GatingCase kGatings[] = {
    {"gpt_oss", {{Activation::kQuickGelu}, 7.0f, 7.0f, 1.0f}},
    {"deepseek_v4", {{Activation::kSilu}, 10.0f, 10.0f, 0.0f}},
    {"plain", {{Activation::kGelu}}},
};

TEST(ApplyGating, LimitsGateAndUpAndAddsTheOffset) {
  for (const auto& [name, gating] : kGatings) {
    SCOPED_TRACE(name);
    std::vector<float> gate, up;
    for (const float g : {-kLargest, -20.0f, -7.5f, -1.0f, -0.0f, 0.5f, 6.9f, 7.0f, 7.1f, 10.5f, 1e6f}) {
      for (const float u : {-1e6f, -10.1f, -10.0f, -7.1f, -1.0f, 0.0f, 0.25f, 6.9f, 7.1f, 10.5f, 1e30f}) {
        gate.push_back(g);
        up.push_back(u);
      }
    }
    ForEachSimd([&, &rule = gating](Simd) {
      std::vector<float> out(gate.size());
      ApplyGating(rule, gate.data(), up.data(), out.data(), static_cast<int64_t>(gate.size()));
      for (size_t i = 0; i < gate.size(); ++i) {
        const long double g = std::fmin(gate[i], rule.gate_max);
        const long double u = std::fmin(std::fmax(up[i], -rule.up_limit), rule.up_limit);
        const long double want = Reference(rule.activation, g) * (u + rule.up_offset);
        EXPECT_LE(UlpError(DType::kFloat32, out[i], want), kUlpBudget) << gate[i] << " " << up[i];
      }
    });
  }
}

TEST(ApplyGating, KeepsNanOfGateAndOfUpWhateverTheLimits) {
  for (const auto& [name, gating] : kGatings) {
    SCOPED_TRACE(name);
    ForEachSimd([&, &rule = gating](Simd) {
      std::vector<float> gate(21, 1.0f), up(21, 1.0f), out(21);
      gate[3] = gate[19] = kNan;
      up[4] = up[19] = up[20] = -kNan;
      ApplyGating(rule, gate.data(), up.data(), out.data(), 21);
      for (size_t i = 0; i < out.size(); ++i) {
        EXPECT_EQ(std::isnan(out[i]), i == 3 || i == 4 || i >= 19) << i;
      }
    });
  }
}

TEST(ApplyGating, StaysClosedWhateverUpIs) {
  for (const Activation kind : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu}) {
    ForEachSimd([&](Simd) {
      for (const float g : {-1000.0f, -kLargest, -kInf}) {
        for (const float u : {kLargest, -kLargest, 1.0f, 0.0f}) {
          float out = 1.0f;
          ApplyGating({.activation = {kind}}, &g, &u, &out, 1);
          EXPECT_EQ(out, 0.0f) << g << " " << u;
          EXPECT_EQ(std::signbit(out), !std::signbit(u)) << g << " " << u;
        }
      }
    });
  }
}

TEST(ApplyGating, KeepsFarTailsThatALargeUpBringsBack) {
  const float gate = -16.0f;  // gelu(-16) is far below float32's least value
  const float up = 1e38f;
  const long double want = Reference({Activation::kGelu}, gate) * up;
  ForEachSimd([&](Simd) {
    float out = 0.0f;
    ApplyGating({.activation = {Activation::kGelu}}, &gate, &up, &out, 1);
    EXPECT_LE(UlpError(DType::kFloat32, out, want), kUlpBudget);
    EXPECT_NE(out, 0.0f);
  });
}

TEST(ApplyGating, TakesAnyLengthAndMayWriteOverGateOrUp) {
  const Gating gating = {{Activation::kSilu}, 2.0f, 3.0f, 0.5f};
  ForEachSimd([&](Simd) {
    for (size_t n = 0; n <= 2 * 16 + 1; ++n) {
      for (size_t shift = 0; shift < 3; ++shift) {
        std::vector<float> gate(shift + n + 1), up(shift + n + 1), out(shift + n + 1, 42.0f);
        for (size_t i = 0; i < gate.size(); ++i) {
          gate[i] = static_cast<float>(i) / 3 - 4;
          up[i] = 5 - static_cast<float>(i) / 4;
        }
        const int64_t count = static_cast<int64_t>(n);
        ApplyGating(gating, gate.data() + shift, up.data() + shift, out.data() + shift, count);
        EXPECT_EQ(out[shift + n], 42.0f);
        std::vector<float> over_gate = gate, over_up = up;
        ApplyGating(gating, over_gate.data() + shift, up.data() + shift, over_gate.data() + shift, count);
        ApplyGating(gating, gate.data() + shift, over_up.data() + shift, over_up.data() + shift, count);
        EXPECT_EQ(std::memcmp(over_gate.data() + shift, out.data() + shift, n * sizeof(float)), 0);
        EXPECT_EQ(std::memcmp(over_up.data() + shift, out.data() + shift, n * sizeof(float)), 0);
        EXPECT_EQ(over_gate[shift + n], gate[shift + n]);
        EXPECT_EQ(over_up[shift + n], up[shift + n]);
      }
    }
  });
}

}  // namespace
}  // namespace layerd
