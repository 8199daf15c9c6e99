// normalize_rows divided over threads: the bits of one thread.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "lib/base/parallel.h"
#include "lib/kernels/normalize_rows.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/normalize_rows_testing.h"

namespace layerd {
namespace {

void CheckEveryNumberOfThreads(const Problem& p) {
  const Answer one = CheckEveryTarget(p);
  for (const int threads : {1, 2, 5}) {
    const Arena arena(threads);
    ForEachSimd([&](Simd) { EXPECT_TRUE(Normalize(arena, p) == one) << threads << " threads"; });
  }
}

TEST(NormalizeRowsParallel, DividesManyRows) {
  for (const DType dtype : kDTypes) {
    Problem p = RandomProblem(501, 300, dtype, dtype);
    p.has_gamma = p.has_residual = true;
    CheckEveryNumberOfThreads(p);
  }
}

TEST(NormalizeRowsParallel, DividesTheGroupsOfARow) {
  Problem p = RandomProblem(1, 128 * 1300, DType::kBFloat16, DType::kFloat32);
  p.group_size = 128;
  p.has_gamma = true;
  p.stream = true;
  CheckEveryNumberOfThreads(p);
}

// Far longer than a block, not a multiple of one.
constexpr int64_t kLong = 300001;

TEST(NormalizeRowsParallel, DividesOneLongRow) {
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      Problem p = RandomProblem(1, kLong, dtype, dtype);
      p.kind = kind;
      p.has_gamma = p.has_beta = p.has_residual = true;
      CheckEveryNumberOfThreads(p);
      for (float& x : p.input) x = RoundTo(dtype, x + 4);  // LayerNorm goes through it once more
      CheckEveryNumberOfThreads(p);
    }
  }
}

TEST(NormalizeRowsParallel, DividesLongGatedGroups) {
  for (const GatePosition gate : {GatePosition::kFirst, GatePosition::kLast}) {
    Problem p = RandomProblem(1, 2 * 140000, DType::kBFloat16, DType::kBFloat16);
    p.group_size = 140000;
    p.gate_position = gate;
    p.round_before_gamma = true;
    p.has_gamma = p.has_residual = true;
    CheckEveryNumberOfThreads(p);
  }
}

// More blocks than are summed in one wave.
TEST(NormalizeRowsParallel, DividesARowOfManyWaves) {
  const int64_t dim = (kSanitized ? 200 : 1100) * 8192 + 5;
  Problem p = {.rows = 1, .dim = dim, .group_size = dim};
  p.kind = NormKind::kLayerNorm;
  p.input.resize(static_cast<size_t>(dim));
  for (size_t i = 0; i < p.input.size(); ++i) p.input[i] = static_cast<float>(static_cast<int>(i * 2654435761u >> 8));
  const Answer one = Normalize(p);
  const Arena arena(3);
  EXPECT_TRUE(Normalize(arena, p) == one);
}

TEST(NormalizeRowsParallel, KeepsNanAndInfinityToTheirLongRow) {
  Problem p = RandomProblem(3, kLong, DType::kFloat32, DType::kFloat32);
  const Arena arena(2);
  const Answer clean = Normalize(arena, p);
  p.input[kLong + 77] = std::numeric_limits<float>::quiet_NaN();
  p.input[2 * kLong + 12345] = std::numeric_limits<float>::infinity();
  const Answer answer = Normalize(arena, p);
  EXPECT_TRUE(Normalize(p) == answer);
  size_t differ = 0;
  for (size_t i = 0; i < kLong; ++i) differ += answer.output[i] != clean.output[i];
  EXPECT_EQ(differ, 0u);
  EXPECT_TRUE(std::isnan(answer.output[kLong]));
  EXPECT_EQ(answer.output[2 * kLong], 0.0f);
}

TEST(NormalizeRowsParallel, DoesNothingForNoRows) {
  Problem p = RandomProblem(0, 16, DType::kFloat32, DType::kFloat32);
  const Arena arena(2);
  EXPECT_TRUE(Normalize(arena, p) == Normalize(p));
}

}  // namespace
}  // namespace layerd
