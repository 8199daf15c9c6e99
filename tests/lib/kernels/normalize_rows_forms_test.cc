// The faster forms of normalize_rows and the order in which groups are gone through: always the scalar twin's bits.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "lib/kernels/normalize_rows.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/normalize_rows_testing.h"

namespace layerd {
namespace {

// The input and output dtypes and the rounding of every form.
struct Kind {
  NormKind kind;
  DType input_dtype;
  DType output_dtype;
  bool round_before_gamma;
  bool short_gamma;  // γ of a narrow type
};

std::vector<Kind> EveryKind() {
  std::vector<Kind> kinds;
  for (const DType input_dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      kinds.push_back({NormKind::kRmsNorm, input_dtype, output_dtype, false, false});
      kinds.push_back({NormKind::kLayerNorm, input_dtype, output_dtype, false, false});
      if (input_dtype == DType::kFloat32) continue;
      for (const bool short_gamma : {false, true}) {
        kinds.push_back({NormKind::kRmsNorm, input_dtype, output_dtype, true, short_gamma});
      }
    }
  }
  return kinds;
}

std::string ToString(const Kind& kind) {
  return std::string(kind.kind == NormKind::kRmsNorm ? "RMSNorm " : "LayerNorm ") +
         std::string(Name(kind.input_dtype)) + " to " + std::string(Name(kind.output_dtype)) +
         (kind.round_before_gamma ? " rounded before gamma" : "") + (kind.short_gamma ? ", short gamma" : "");
}

Problem RandomProblem(const Kind& kind, int64_t rows, int64_t dim, uint32_t seed = 1) {
  Problem p = RandomProblem(rows, dim, kind.input_dtype, kind.output_dtype, seed);
  p.kind = kind.kind;
  p.round_before_gamma = kind.round_before_gamma;
  p.has_gamma = true;
  p.has_beta = kind.kind == NormKind::kLayerNorm;
  if (kind.short_gamma) {
    for (float& gamma : p.gamma) gamma = RoundTo(kind.input_dtype, gamma);
  }
  return p;
}

TEST(NormalizeRowsForms, GiveTheTwinsBitsAtEveryLengthAndNumberOfRows) {
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    uint32_t seed = 0;
    for (const int64_t dim : {1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 100, 257, 1000, 1040}) {
      const int64_t rows = 1 + seed % 9;
      CheckEveryTarget(RandomProblem(kind, rows, dim, ++seed));
    }
  }
}

TEST(NormalizeRowsForms, GiveTheTwinsBitsOnRowsOfSeveralBlocks) {
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    for (const int64_t dim : {8191, 8192, 8200, 17000}) CheckEveryTarget(RandomProblem(kind, kSanitized ? 1 : 3, dim));
  }
  // Longer than what is gone through in tiles.
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    CheckEveryTarget(RandomProblem({kind, DType::kFloat32, DType::kFloat32, false, false}, 2, 65537));
    CheckEveryTarget(RandomProblem({kind, DType::kBFloat16, DType::kBFloat16, false, false}, 2, 65552));
  }
}

TEST(NormalizeRowsForms, GiveTheTwinsBitsInAHugeRowOfSmallGroups) {
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    Problem p = RandomProblem({kind, DType::kBFloat16, DType::kFloat32, false, false}, 1, ((1 << 20) / 192 + 1) * 192);
    p.group_size = 192;
    CheckEveryTarget(p);
  }
}

// Each of the groups beside one another in a tile is aligned differently where the row's length is odd.
TEST(NormalizeRowsForms, StreamTheTwinsBitsAtEveryAlignment) {
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    for (const int64_t dim : {7, 33, 64, 144}) {
      Problem p = RandomProblem(kind, 7, dim);
      p.stream = true;
      p.output_misalignment = 0;
      const Answer aligned = CheckEveryTarget(p);
      for (size_t misalignment = 1; misalignment < 33; ++misalignment) {
        p.misalignment = 33 - misalignment;
        p.output_misalignment = misalignment;
        EXPECT_TRUE(Normalize(p) == aligned) << misalignment;
      }
    }
  }
}

TEST(NormalizeRowsForms, StreamTheTwinsBitsOnRowsOfSeveralBlocksAndInGroups) {
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    Problem p = RandomProblem(kind, 5, 8211);
    p.stream = true;
    CheckEveryTarget(p);
    p = RandomProblem(kind, 5, 1000);
    p.stream = true;
    p.group_size = 40;
    CheckEveryTarget(p);
  }
}

TEST(NormalizeRowsForms, AddTheResidualOnce) {
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    for (const bool stream : {false, true}) {
      Problem p = RandomProblem(kind, 6, 1100);
      p.has_residual = true;
      p.stream = stream;
      CheckEveryTarget(p);
    }
  }
}

TEST(NormalizeRowsForms, GiveARowTheSameBitsAloneAndInEveryBatch) {
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    constexpr int64_t kDim = 83;
    for (const bool stream : {false, true}) {
      Problem p = RandomProblem(kind, 70, kDim);
      p.stream = stream;
      const Answer all = Normalize(p);
      for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 65}) {
        const int64_t first = 70 - rows;
        const Answer some = Normalize(p, first, 70);
        const size_t bytes = SizeOf(kind.output_dtype) * static_cast<size_t>(kDim);
        EXPECT_EQ(
            std::memcmp(some.output.data() + bytes * static_cast<size_t>(first),
                        all.output.data() + bytes * static_cast<size_t>(first), bytes * static_cast<size_t>(rows)),
            0)
            << rows;
      }
    }
  }
}

// Rows that a form does not take, beside rows that it does.
TEST(NormalizeRowsForms, KeepNanInfinityAndExtremesToTheirRow) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float special[] = {kNan, -kNan, kInf, -kInf, 3e38f, -3e38f, 1e-41f, -0.0f};
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    for (const bool stream : {false, true}) {
      for (size_t at = 0; at < 9; ++at) {
        Problem p = RandomProblem(kind, 9, 50);
        p.stream = stream;
        const Answer clean = Normalize(p);
        for (size_t i = 0; i < 8; ++i) {
          p.input[at * 50 + i * 6] = RoundTo(kind.input_dtype, special[i]);
          if (at % 2 == 0) break;  // one of them only
        }
        const Answer answer = CheckEveryTarget(p);
        for (size_t i = 0; i < 9 * 50; ++i) {
          if (i / 50 != at) {
            EXPECT_EQ(answer.output[i], clean.output[i]);
          }
        }
      }
    }
  }
}

// Numbers of every magnitude: products and remainders of the estimates overflow, underflow and vanish.
TEST(NormalizeRowsForms, GiveTheTwinsBitsFromDenormalToHuge) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    for (const int spread : {10, 40, 80, 140}) {
      std::uniform_int_distribution<int> exponent(-spread, spread * 3 / 4);
      const auto any = [&] { return std::ldexp(normal(random), exponent(random)); };
      for (int repeat = 0; repeat < 6; ++repeat) {
        Problem p = RandomProblem(kind, 9, 40);
        p.stream = repeat % 2 == 0;
        // Rows' own magnitudes, elements' beside them, γ's.
        for (size_t i = 0; i < p.input.size(); ++i) {
          if (repeat < 4) p.input[i] *= std::ldexp(1.0f, exponent(random) / 2 * static_cast<int>(i / 40 % 3));
          if (repeat % 3 == 0 && i % 5 == 0) p.input[i] = any();
          if (i % 7 == 0) p.input[i] = std::copysign(0.0f, normal(random));
          p.input[i] = RoundTo(kind.input_dtype, p.input[i]);
        }
        for (float& gamma : p.gamma) {
          gamma = any();
          if (kind.short_gamma) gamma = RoundTo(kind.input_dtype, gamma);
        }
        if (repeat % 3 == 1) p.gamma[11] = -0.0f;
        CheckEveryTarget(p);
      }
    }
  }
}

// One row in a tile raises the processor's flags, and the rows beside it are right as well.
TEST(NormalizeRowsForms, NoticeUnderflowInsideOfTheEstimates) {
  for (const bool stream : {false, true}) {
    for (size_t row = 0; row < 6; ++row) {
      Problem p = RandomProblem({NormKind::kRmsNorm, DType::kFloat32, DType::kFloat32, false, false}, 6, 64);
      p.stream = stream;
      p.gamma[5] = 1.2345e-20f;
      p.input[row * 64 + 5] = 3.21e-20f;  // x·γ and the result are denormal
      const Answer answer = CheckEveryTarget(p);
      EXPECT_LT(std::fabs(answer.output[row * 64 + 5]), std::numeric_limits<float>::min());
    }
  }
}

TEST(NormalizeRowsForms, NoticeOverflowInsideOfTheEstimates) {
  for (const bool stream : {false, true}) {
    for (size_t row = 0; row < 6; ++row) {
      Problem p = RandomProblem({NormKind::kRmsNorm, DType::kFloat32, DType::kFloat32, false, false}, 6, 64);
      p.stream = stream;
      p.gamma[6] = 3.3e25f;
      for (size_t i = 0; i < 64; ++i) p.input[row * 64 + i] *= 1e15f;  // x·γ is beyond float32, the result is not
      const Answer answer = CheckEveryTarget(p);
      EXPECT_TRUE(std::isfinite(answer.output[row * 64 + 6]));
      EXPECT_GT(std::fabs(answer.output[row * 64 + 6]), 1e22f);
    }
  }
}

TEST(NormalizeRowsForms, TakeEveryKindOfGamma) {
  for (const Kind& kind : EveryKind()) {
    SCOPED_TRACE(ToString(kind));
    Problem p = RandomProblem(kind, 5, 90);
    p.has_gamma = false;
    CheckEveryTarget(p);
    p.has_gamma = true;
    p.gamma_offset = 1.0;  // γ + 1 is not always a float32
    CheckEveryTarget(p);
    for (float& gamma : p.gamma) gamma = std::round(gamma * 64) / 64;
    CheckEveryTarget(p);  // now it is
    p.gamma_offset = 1e-30;
    CheckEveryTarget(p);
    p.gamma_offset = 1e300;
    CheckEveryTarget(p);
    p.gamma_offset = 0.0;
    for (const float odd : {1e-30f, 1e30f, 1e-42f, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), 0.0f, -0.0f, -1.1f}) {
      p.gamma[70] = odd;
      CheckEveryTarget(p);
    }
    p.has_beta = true;
    p.gamma[70] = 1.5f;
    for (const float odd : {0.0f, -0.0f, std::numeric_limits<float>::infinity()}) {
      p.beta[80] = odd;
      CheckEveryTarget(p);
    }
  }
}

// r of a row of ±1 with this ε.
double InverseOf(double epsilon) { return 1.0 / std::sqrt(1.0 + epsilon); }

// The ε for which r is `r` to the bit, or NaN where none of those nearby is.
double EpsilonFor(double r) {
  const double guess = (1.0 / r) * (1.0 / r) - 1.0;
  double up = guess, down = guess;
  for (int i = 0; i < 20000; ++i) {
    if (InverseOf(up) == r) return up;
    if (InverseOf(down) == r) return down;
    up = std::nextafter(up, 1.0);
    down = std::nextafter(down, 0.0);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

// Rows of ±1, γ of powers of two: every result is r, but for its power of two. r is put where the rounding to the
// output's type changes, and 1, 2, 4, … of float64's units beside it, on both sides: across what the estimates can tell.
TEST(NormalizeRowsForms, RoundWhatLiesAtATieAndBesideIt) {
  int seen = 0;
  for (const Kind& kind : EveryKind()) {
    if (kind.kind == NormKind::kLayerNorm) continue;
    SCOPED_TRACE(ToString(kind));
    // With rounding before γ the first of the two has the tie.
    const DType tie_of = kind.round_before_gamma ? kind.input_dtype : kind.output_dtype;
    const int dropped = 52 - MantissaBits(tie_of);
    for (const double near : {0.7071, 0.8125, 0.93}) {
      const uint64_t kept = std::bit_cast<uint64_t>(near) >> dropped;
      for (const uint64_t even_or_odd : {0, 1}) {
        const uint64_t tie = ((kept + even_or_odd) << dropped) + (uint64_t{1} << (dropped - 1));
        for (int shift = -1; shift < dropped; shift += shift < 24 ? 1 : 3) {
          for (const int sign : {-1, 1}) {
            const uint64_t beside = shift < 0 ? 0 : uint64_t{1} << shift;
            const double epsilon = EpsilonFor(std::bit_cast<double>(sign < 0 ? tie - beside : tie + beside));
            if (!(epsilon >= 0)) continue;
            Problem p = RandomProblem(kind, 5, 48);
            for (size_t i = 0; i < p.input.size(); ++i) p.input[i] = i % 3 == 0 ? -1.0f : 1.0f;
            for (size_t i = 0; i < p.gamma.size(); ++i) p.gamma[i] = std::ldexp(1.0f, static_cast<int>(i) - 20);
            p.epsilon = epsilon;
            const Answer answer = CheckEveryTarget(p);
            const double r = InverseOf(epsilon);
            for (size_t i = 0; i < 48; ++i) {
              long double y = (i % 3 == 0 ? -1.0L : 1.0L) * r;
              if (kind.round_before_gamma) y = Rounded(kind.input_dtype, y);
              y = Rounded(kind.output_dtype, y * static_cast<long double>(p.gamma[i]));
              if (std::fabs(y) < 65520) {
                EXPECT_EQ(answer.output[i], static_cast<float>(y));
              }
            }
            ++seen;
          }
        }
      }
    }
  }
  EXPECT_GT(seen, 1000);
}

// γ that puts every result within a unit or so of float32's last place of a tie of the narrow output, while r and r·γ are
// just above 1 and the result is just below 1, where their roundings add up to most of its units; r's is nearly the
// greatest there is, up or down. Only one of a vector, lest another one's doubt save it.
TEST(NormalizeRowsForms, RoundWhatGammaPutsBesideATie) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> below_tie(0.93f, 0.96f);
  for (const Kind& kind : EveryKind()) {
    if (kind.kind == NormKind::kLayerNorm || kind.output_dtype == DType::kFloat32 || kind.round_before_gamma) continue;
    SCOPED_TRACE(ToString(kind));
    for (uint32_t seed = 1; seed <= 20; ++seed) {
      Problem p = RandomProblem(kind, 1, 2048, seed);
      double squares = 0;
      for (float& x : p.input) {
        x = RoundTo(kind.input_dtype, below_tie(random));
        squares += static_cast<double>(x) * x;
      }
      const double r = 1 + (static_cast<double>(random() % 1000) + (seed % 2 == 0 ? 0.49 : 0.51)) * 0x1p-23;
      p.epsilon = (1 / r) * (1 / r) - squares / 2048;
      const double units = std::ldexp(1.0, MantissaBits(kind.output_dtype) + 1);
      for (size_t i = seed % 16; i < p.gamma.size(); i += 16) {
        const double tie = 1 - (static_cast<double>(random() % 8) + 0.5) / units;
        p.gamma[i] = static_cast<float>(tie / (r * p.input[i]));
      }
      CheckEveryTarget(p);
    }
  }
}

// Products of a rounded n of 8 bits and a γ of 13 that come so close to half of the least bfloat16 that float32, whose
// last place is 2⁻¹⁴⁹ there, cannot tell them from it.
TEST(NormalizeRowsForms, RoundShortProductsBesideHalfOfTheLeastValue) {
  int seen = 0;
  for (int m = 129; m < 256; ++m) {
    for (int k = 4096; k < 8192; ++k) {
      const int beside = m * k - (1 << 20);  // in units of 2⁻¹⁵⁴, from 2⁻¹³⁴
      if (beside == 0 || std::abs(beside) >= 16) continue;
      const float n = std::ldexp(static_cast<float>(m), -16);
      Problem p = Given(DType::kBFloat16, std::vector<float>(32, n), 1.0 - static_cast<double>(n) * n);  // r = 1
      p.round_before_gamma = true;
      p.has_gamma = true;
      p.gamma.assign(32, std::ldexp(static_cast<float>(k), -138));
      EXPECT_EQ(CheckEveryTarget(p).output[0], beside > 0 ? 0x1p-133f : 0.0f) << m << " * " << k;
      ++seen;
    }
  }
  EXPECT_GT(seen, 20);
}

}  // namespace
}  // namespace layerd
