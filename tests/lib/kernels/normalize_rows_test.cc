#include "lib/kernels/normalize_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/normalize_rows_testing.h"

namespace layerd {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::FloatNear;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
TEST(NormalizeRows, RoundsRmsNormOnceAtEveryLengthAndDType) {
  long double worst = 0;
  for (const DType input_dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      for (int64_t dim = 1; dim <= 70; ++dim) {
        Problem p = RandomProblem(2, dim, input_dtype, output_dtype, static_cast<uint32_t>(dim));
        p.has_gamma = true;
        ForEachSimd([&](Simd) { worst = std::max(worst, CheckAgainstReference(p, Normalize(p))); });
      }
    }
  }
  RecordProperty("max_ulp", std::to_string(worst));
}

TEST(NormalizeRows, RoundsLayerNormOnceAtEveryLengthAndDType) {
  long double worst = 0;
  for (const DType input_dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      for (int64_t dim = 1; dim <= 70; ++dim) {
        Problem p = RandomProblem(2, dim, input_dtype, output_dtype, static_cast<uint32_t>(dim));
        p.kind = NormKind::kLayerNorm;
        p.epsilon = 1e-5;
        p.has_gamma = p.has_beta = true;
        ForEachSimd([&](Simd) { worst = std::max(worst, CheckAgainstReference(p, Normalize(p))); });
      }
    }
  }
  RecordProperty("max_ulp", std::to_string(worst));
}

TEST(NormalizeRows, KeepsItsBoundOnLongRows) {
  for (const int64_t dim : {8191, 8192, 8193, 20000}) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      Problem p = RandomProblem(1, dim, DType::kFloat32, DType::kFloat32);
      p.kind = kind;
      p.has_gamma = p.has_beta = kind == NormKind::kLayerNorm;
      const Answer answer = Normalize(p);
      CheckAgainstReference(p, answer);
      ForEachSimd([&](Simd) { EXPECT_TRUE(Normalize(p) == answer) << dim; });
    }
  }
}

TEST(NormalizeRows, RoundsOnceAtTheEdgesOfTheOutputsRange) {
  for (const DType output_dtype : kDTypes) {
    // Denormal results of each dtype, results that vanish, and results on both sides of the largest value.
    for (const float scale : {1e-6f, 3e-8f, 1e-39f, 1e-41f, 4e4f, 2e38f}) {
      Problem p = RandomProblem(4, 100, DType::kFloat32, output_dtype);
      p.has_gamma = true;
      for (float& gamma : p.gamma) gamma *= scale;
      ForEachSimd([&](Simd) { CheckAgainstReference(p, Normalize(p)); });
    }
  }
}

// Calls body with every combination of options, on small problems of many lengths.
void ForEachCombination(const std::function<void(const Problem&)>& body) {
  constexpr int64_t kDims[] = {1, 7, 16, 24, 37, 66};
  uint32_t seed = 0;
  for (const DType input_dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
        for (const GatePosition gate : {GatePosition::kNone, GatePosition::kFirst, GatePosition::kLast}) {
          for (int flags = 0; flags < 32; ++flags) {
            const int64_t dim = kDims[++seed % std::size(kDims)];
            Problem p = RandomProblem(3, dim, input_dtype, output_dtype, seed);
            p.kind = kind;
            p.gate_position = gate;
            p.has_residual = (flags & 1) != 0;
            p.has_gamma = (flags & 2) != 0;
            p.has_beta = (flags & 4) != 0;
            p.round_before_gamma = (flags & 8) != 0;
            p.gamma_offset = (flags & 16) != 0 ? 1.0 : 0.0;
            if (dim % 8 == 0) p.group_size = 8;
            if (dim % 33 == 0) p.group_size = 33;
            body(p);
          }
        }
      }
    }
  }
}

TEST(NormalizeRows, FollowsTheFormulaInEveryCombinationOfOptions) {
  ForEachCombination([](const Problem& p) {
    // Rounding n is a step: where the reference's n lies beside a tie, one rounds up and the other down. The seeds are
    // fixed, and no n of theirs does. LayerNorm's bound says nothing of a step that comes after, so there is none here.
    if (p.kind == NormKind::kLayerNorm && p.gate_position == GatePosition::kLast) return;
    CheckAgainstReference(p, Normalize(p));
  });
}

TEST(NormalizeRows, GivesTheSameBitsOnEveryTargetInEveryCombinationOfOptions) {
  ForEachCombination([](const Problem& p) {
    const Answer answer = Normalize(p);
    ForEachSimd([&](Simd) { EXPECT_TRUE(Normalize(p) == answer); });
  });
}

// Rounding to float32 hides nearly every difference of a last bit in float64. With β = −(n·γ rounded), what is left is
// small enough for its float32 to show them.
TEST(NormalizeRows, GivesTheSameBitsOnEveryTargetWhereBetaCancelsTheResult) {
  for (const int64_t dim : {37, 300, 9001}) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      for (const bool gated : {false, true}) {
        for (uint32_t seed = 1; seed <= 10; ++seed) {
          Problem p = RandomProblem(1, dim, DType::kFloat32, DType::kFloat32, seed);
          p.kind = kind;
          p.has_gamma = true;
          if (gated) p.gate_position = GatePosition::kFirst;
          p.beta = Normalize(p).output.Values();
          for (float& beta : p.beta) beta = -beta;
          p.has_beta = true;
          const Answer answer = Normalize(p);
          ForEachSimd([&](Simd) { ASSERT_TRUE(Normalize(p) == answer) << dim << " seed " << seed; });
        }
      }
    }
  }
}

TEST(NormalizeRows, GivesTheSameBitsOnEveryTargetForNanInfinityZeroAndDenormals) {
  for (const DType input_dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      for (int options = 0; options < 16; ++options) {
        Problem p = RandomProblem(8, 40, input_dtype, output_dtype);
        const float special[] = {kNan, -kNan, kInf, -kInf, 1e-41f, -0.0f, 6e-8f, std::numeric_limits<float>::max()};
        for (size_t row = 0; row < 8; ++row) {
          p.input[row * 40 + row * 3] = special[row];
          p.residual[row * 40 + 1] = special[row];
          p.gate[row * 40 + 2] = special[row];
        }
        p.gamma[5] = kNan;
        p.beta[5] = -kNan;
        p.beta[6] = -kInf;
        p.has_gamma = (options & 1) != 0;
        p.has_beta = (options & 2) != 0;
        p.has_residual = (options & 4) != 0;
        p.gate_position = (options & 8) != 0 ? GatePosition::kLast : GatePosition::kFirst;
        const Answer answer = Normalize(p);
        ForEachSimd([&](Simd) { EXPECT_TRUE(Normalize(p) == answer) << options; });
      }
    }
  }
}

TEST(NormalizeRows, GivesARowTheSameBitsAloneAndInABatch) {
  ForEachSimd([](Simd) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      Problem batch = RandomProblem(5, 67, DType::kBFloat16, DType::kBFloat16);
      batch.kind = kind;
      batch.has_gamma = batch.has_beta = batch.has_residual = true;
      const Answer all = Normalize(batch);
      for (size_t row = 0; row < 5; ++row) {
        Problem alone = batch;
        alone.rows = 1;
        const auto cut = [&](std::vector<float>& values) {
          values = std::vector<float>(values.begin() + static_cast<std::ptrdiff_t>(row * 67),
                                      values.begin() + static_cast<std::ptrdiff_t>(row * 67 + 67));
        };
        cut(alone.input);
        cut(alone.residual);
        const Answer one = Normalize(alone);
        for (size_t i = 0; i < 67; ++i) {
          EXPECT_EQ(one.output[i], all.output[row * 67 + i]);
          EXPECT_EQ(one.residual_sum[i], all.residual_sum[row * 67 + i]);
        }
        EXPECT_EQ(one.inverse[0], all.inverse[row]);
      }
    }
  });
}

TEST(NormalizeRows, WritesOnlyTheRowsItIsGiven) {
  ForEachSimd([](Simd) {
    const Problem p = RandomProblem(5, 20, DType::kFloat32, DType::kFloat32);
    const Answer all = Normalize(p), some = Normalize(p, 1, 3);
    for (size_t i = 0; i < 100; ++i) EXPECT_EQ(some.output[i], i >= 20 && i < 60 ? all.output[i] : 0.0f);
    EXPECT_THAT(some.inverse, ElementsAre(0, all.inverse[1], all.inverse[2], 0, 0));
  });
}

// 2¹⁰⁰ swallows every 1 that is added to it, so the mean tells which elements were added to the same accumulator while
// it was there.
TEST(NormalizeRows, SumsInTheDocumentedOrder) {
  const float huge = 0x1p100f;
  const auto total = [](const std::vector<float>& input) {
    Problem p = Given(DType::kFloat32, input, 1e-5);
    p.kind = NormKind::kLayerNorm;
    return Normalize(p).mean[0] * static_cast<float>(input.size());
  };
  ForEachSimd([&](Simd) {
    std::vector<float> same_accumulator(64, 1.0f);
    same_accumulator[3] = huge;
    same_accumulator[3 + 48] = -huge;  // two ones are lost between them
    EXPECT_EQ(total(same_accumulator), 60.0f);

    std::vector<float> first_level(16, 1.0f);
    first_level[2] = huge;
    first_level[2 + 8] = -huge;  // meet first: nothing is lost
    EXPECT_EQ(total(first_level), 14.0f);

    std::vector<float> second_level(16, 1.0f);
    second_level[2] = huge;
    second_level[2 + 4] = -huge;  // meet after each took one other
    EXPECT_EQ(total(second_level), 12.0f);

    std::vector<float> last_level(16, 1.0f);
    last_level[0] = huge;
    last_level[1] = -huge;  // meet last
    EXPECT_EQ(total(last_level), 0.0f);

    std::vector<float> blocks(3 * 8192, 0.0f);
    blocks[0] = huge;
    blocks[8192 + 5] = 1.0f;      // lost: block 1 is added while block 0's sum stands
    blocks[2 * 8192 - 1] = 1.0f;  // lost too
    blocks[2 * 8192] = -huge;
    blocks[2 * 8192 + 1] = 1.0f;  // the same block as −huge but another accumulator, lost in its tree
    EXPECT_EQ(total(blocks), 0.0f);

    std::vector<float> partial_block(8193, 1.0f);
    partial_block[8191] = huge;
    partial_block[8191 - 16] = -huge;  // swallows the 510 ones before it; the last element is in the next block
    EXPECT_EQ(total(partial_block), 8191.0f - 510.0f);
  });
}

TEST(NormalizeRows, NormalisesGroupsAsIfTheyWereRows) {
  ForEachSimd([](Simd) {
    Problem grouped = RandomProblem(3, 96, DType::kFloat32, DType::kFloat32);
    grouped.group_size = 24;
    Problem rows = grouped;
    rows.rows = 12;
    rows.dim = rows.group_size = 24;
    EXPECT_TRUE(Normalize(grouped) == Normalize(rows));
  });
}

TEST(NormalizeRows, GivesZerosForAnAllZeroRowWithoutEpsilon) {
  ForEachSimd([](Simd) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      Problem p = Given(DType::kFloat32, std::vector<float>(21, 0.0f), 0.0);
      p.kind = kind;
      const Answer answer = Normalize(p);
      EXPECT_THAT(answer.output.Values(), Each(0.0f));
      EXPECT_THAT(answer.inverse, ElementsAre(0.0f));
    }
  });
}

TEST(NormalizeRows, GivesBetaForAConstantRowOfLayerNormWithoutEpsilon) {
  ForEachSimd([](Simd) {
    Problem p = Given(DType::kFloat32, {5.0f, 5.0f, 5.0f, 5.0f}, 0.0);
    p.kind = NormKind::kLayerNorm;
    p.has_beta = true;
    p.beta = {1.0f, -2.0f, 3.0f, 0.5f};
    EXPECT_THAT(Normalize(p).output.Values(), ElementsAre(1.0f, -2.0f, 3.0f, 0.5f));
  });
}

TEST(NormalizeRows, ContainsNanAndInfinityToTheirRow) {
  ForEachSimd([](Simd) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      Problem p = RandomProblem(3, 35, DType::kFloat32, DType::kFloat32);
      p.kind = kind;
      const Answer clean = Normalize(p);
      for (const float bad : {kNan, kInf, -kInf}) {
        p.input[35 + 34] = bad;
        const Answer answer = Normalize(p);
        for (size_t i = 0; i < 105; ++i) {
          if (i / 35 != 1) {
            EXPECT_EQ(answer.output[i], clean.output[i]);
          }
        }
        EXPECT_TRUE(std::isnan(answer.output[35 + 34]));
        // x/√∞ is 0 for the rest of an RMSNorm row; a NaN, or an infinite mean, leaves nothing.
        const bool rest_is_zero = kind == NormKind::kRmsNorm && std::isinf(bad);
        EXPECT_EQ(answer.output[35] == 0.0f, rest_is_zero);
        EXPECT_EQ(std::isnan(answer.output[35]), !rest_is_zero);
      }
    }
  });
}

// Cases that other implementations get wrong; expected values worked out apart from this code.
TEST(NormalizeRows, DoesNotOverflowFloat16OrFloat32Inside) {
  ForEachSimd([](Simd) {
    const Answer sum = Normalize(Given(DType::kFloat16, std::vector<float>(4096, 4.0f), 1e-6));
    EXPECT_THAT(sum.output.Values(), Each(1.0f));
    const Answer square = Normalize(Given(DType::kFloat16, {8000.0f, 8000.0f, -8000.0f, 8000.0f}, 1e-6));
    EXPECT_THAT(square.output.Values(), ElementsAre(1.0f, 1.0f, -1.0f, 1.0f));
    const Answer wide = Normalize(Given(DType::kFloat32, {1e20f, -1e20f, 0.0f, 0.0f}, 1e-6));
    EXPECT_THAT(wide.output.Values(), ElementsAre(1.41421356f, -1.41421356f, 0.0f, 0.0f));
  });
}

TEST(NormalizeRows, DoesNotUnderflowFloat32Inside) {
  ForEachSimd([](Simd) {
    EXPECT_THAT(Normalize(Given(DType::kFloat32, std::vector<float>(4, 1e-25f), 0.0)).output.Values(), Each(1.0f));
    EXPECT_THAT(Normalize(Given(DType::kFloat32, std::vector<float>(4, 1e-25f), 1e-6)).output.Values(),
                Each(FloatEq(1e-22f)));
  });
}

TEST(NormalizeRows, KeepsDenormals) {
  ForEachSimd([](Simd) {
    const Answer answer = Normalize(Given(DType::kFloat32, std::vector<float>(8, 1e-40f), 1e-6));
    EXPECT_THAT(answer.output.Values(), Each(FloatNear(9.99994610111476e-38f, 1e-42f)));
    Problem p = Given(DType::kFloat32, std::vector<float>(8, 1.0f), 0.0);
    p.has_gamma = true;
    p.gamma.assign(8, 1e-40f);
    EXPECT_THAT(Normalize(p).output.Values(), Each(1e-40f));
  });
}

TEST(NormalizeRows, AddsEpsilonToTheMeanInsideTheRoot) {
  ForEachSimd([](Simd) {
    const Answer rms = Normalize(Given(DType::kFloat32, std::vector<float>(4, 0.001f), 1e-6));
    EXPECT_THAT(rms.output.Values(), Each(FloatEq(0.7071067979794319f)));
    Problem layer = Given(DType::kFloat32, {1.0f, 0.0f, 0.0f, 0.0f}, 1e-5);
    layer.kind = NormKind::kLayerNorm;
    EXPECT_THAT(Normalize(layer).output.Values(),
                ElementsAre(FloatEq(1.7320046213947808f), FloatEq(-0.5773348737982603f), FloatEq(-0.5773348737982603f),
                            FloatEq(-0.5773348737982603f)));
  });
}

TEST(NormalizeRows, CentresBeforeItSquares) {
  ForEachSimd([](Simd) {
    Problem p = Given(DType::kFloat32, {2000.0f, 2001.0f, 2003.0f, 1998.0f}, 1e-5);
    p.kind = NormKind::kLayerNorm;
    EXPECT_THAT(Normalize(p).output.Values(), ElementsAre(FloatEq(-0.2773496714211406f), FloatEq(0.2773496714211406f),
                                                          FloatEq(1.386748357105703f), FloatEq(-1.386748357105703f)));
    p.input = {100.01000213623047f, 99.98999786376953f, 100.0199966430664f, 99.9800033569336f};
    EXPECT_THAT(Normalize(p).output.Values(), ElementsAre(FloatEq(0.6203607605677048f), FloatEq(-0.6203607605677048f),
                                                          FloatEq(1.2402483245217044f), FloatEq(-1.2402483245217044f)));
  });
}

// A row whose mean is small beside its deviation is not gone through again to be centred; the rest is.
TEST(NormalizeRows, StaysWithinItsBoundWhateverTheMean) {
  const float means[] = {0, 1e-3f, 0.2f, 0.245f, 0.25f, 0.255f, 0.3f, -0.25f, 1, -10, 1e3f, 1e5f};
  for (const int64_t dim : {7, 100, 4096, 9001}) {
    for (const DType input_dtype : {DType::kFloat32, DType::kBFloat16}) {
      Problem p = RandomProblem(static_cast<int64_t>(std::size(means)), dim, input_dtype, DType::kFloat32);
      p.kind = NormKind::kLayerNorm;
      p.has_gamma = p.has_beta = true;
      for (size_t i = 0; i < p.input.size(); ++i) {
        p.input[i] = RoundTo(input_dtype, p.input[i] / 3 + means[i / static_cast<size_t>(dim)]);
      }
      const Answer answer = CheckEveryTarget(p);
      CheckAgainstReference(p, answer);
      for (int64_t row = 0; row < p.rows; ++row) {  // the same alone
        const Answer alone = Normalize(p, row, row + 1);
        for (size_t i = static_cast<size_t>(row * dim); i < static_cast<size_t>((row + 1) * dim); ++i) {
          ASSERT_EQ(alone.output[i], answer.output[i]) << dim << " row " << row;
        }
      }
    }
  }
}

TEST(NormalizeRows, SquaresWhatAClosedGateLeftWithoutUnderflow) {
  const float root = std::sqrt(7.5f), deviation = std::sqrt(1.25f);  // of 1, 2, 3, 4
  for (const float gate : {-20.0f, -300.0f, -350.0f, -374.0f, -375.0f, -380.0f, -500.0f, -700.0f}) {
    Problem p = Given(DType::kFloat32, {1, 2, 3, 4}, 0.0);
    p.gate_position = GatePosition::kFirst;
    p.gate.assign(4, gate);
    EXPECT_THAT(CheckEveryTarget(p).output.Values(),
                ElementsAre(FloatEq(-1 / root), FloatEq(-2 / root), FloatEq(-3 / root), FloatEq(-4 / root)));
    p.kind = NormKind::kLayerNorm;
    EXPECT_THAT(CheckEveryTarget(p).output.Values(),
                ElementsAre(FloatEq(1.5f / deviation), FloatEq(0.5f / deviation), FloatEq(-0.5f / deviation),
                            FloatEq(-1.5f / deviation)));
    if (gate > -300) continue;
    p.epsilon = 1e-6;  // far more than the squares
    EXPECT_THAT(CheckEveryTarget(p).output.Values(), Each(FloatNear(0.0f, 1e-37f)));
  }
}

// x · silu(gate) has 53 bits, and so the mean of equal ones is rounded.
TEST(NormalizeRows, GivesZerosForAConstantRowOfLayerNormBehindAGate) {
  for (const int64_t dim : {3, 7, 100, 9001}) {
    for (const float x : {0.1f, 1 / 3.0f, -1e30f}) {
      for (const double epsilon : {0.0, 1e-300}) {
        Problem p = Given(DType::kFloat32, std::vector<float>(static_cast<size_t>(dim), x), epsilon);
        p.kind = NormKind::kLayerNorm;
        p.gate_position = GatePosition::kFirst;
        p.gate.assign(static_cast<size_t>(dim), 0.7f);
        const Answer answer = CheckEveryTarget(p);
        EXPECT_THAT(answer.output.Values(), Each(0.0f)) << dim << " times " << x;
        if (epsilon == 0) {
          EXPECT_EQ(answer.inverse[0], 0.0f) << dim << " times " << x;
        }
      }
    }
  }
}

TEST(NormalizeRows, AddsTheGammaOffsetBeforeItRounds) {
  ForEachSimd([](Simd) {
    Problem p = Given(DType::kBFloat16, {3.0f, 1.0f, 4.0f, 1.0f}, 1e-6);
    p.has_gamma = true;
    p.gamma.assign(4, 15.8125f);
    p.gamma_offset = 1.0;
    EXPECT_THAT(Normalize(p).output.Values(), ElementsAre(19.375f, 6.46875f, 25.875f, 6.46875f));
  });
}

TEST(NormalizeRows, RoundsBeforeGammaOnlyForNarrowInput) {
  ForEachSimd([](Simd) {
    for (const DType dtype : kDTypes) {
      Problem p = RandomProblem(4, 64, dtype, DType::kFloat32);
      p.has_gamma = true;
      const Answer once = Normalize(p);
      p.round_before_gamma = true;
      EXPECT_EQ(Normalize(p) == once, dtype == DType::kFloat32) << Name(dtype);
    }
  });
}

}  // namespace
}  // namespace layerd
