// Problems for NormalizeRows() that own their arrays, and an independent reference in long double.
#ifndef LAYERD_TESTS_LIB_KERNELS_NORMALIZE_ROWS_TESTING_H_
#define LAYERD_TESTS_LIB_KERNELS_NORMALIZE_ROWS_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "lib/base/dtype.h"
#include "lib/base/parallel.h"
#include "lib/kernels/normalize_rows.h"
#include "tests/lib/kernels/kernel_testing.h"

namespace layerd {

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// An array of some dtype that begins `misalignment` elements after an address aligned to a cache line.
class Elements {
 public:
  Elements(DType dtype, size_t n, size_t misalignment = 1)
      : dtype_(dtype),
        n_(n),
        // A line before and one after the elements, to see that nothing is written there.
        storage_((n + misalignment) * SizeOf(dtype) + 3 * kLine),
        begin_(kLine + (kLine - reinterpret_cast<uintptr_t>(storage_.data()) % kLine) + misalignment * SizeOf(dtype)) {}
  Elements(DType dtype, const std::vector<float>& values, size_t misalignment = 1)
      : Elements(dtype, values.size(), misalignment) {
    for (size_t i = 0; i < n_; ++i) Set(i, values[i]);
  }
  Elements(Elements&&) = default;  // moves the storage, which stays where it is
  std::byte* data() { return storage_.data() + begin_; }
  const std::byte* data() const { return storage_.data() + begin_; }
  float operator[](size_t i) const { return LoadAsFloat(dtype_, data(), static_cast<int64_t>(i)); }
  void Set(size_t i, float value) { StoreFromFloat(dtype_, value, data(), static_cast<int64_t>(i)); }
  size_t size() const { return n_; }
  std::vector<float> Values() const {
    std::vector<float> values(n_);
    for (size_t i = 0; i < n_; ++i) values[i] = (*this)[i];
    return values;
  }
  bool operator==(const Elements& other) const {
    return n_ == other.n_ && dtype_ == other.dtype_ && std::memcmp(data(), other.data(), n_ * SizeOf(dtype_)) == 0;
  }
  // Nothing was written beside the elements.
  bool EdgesAreUntouched() const {
    const auto is_zero = [](std::byte b) { return b == std::byte{0}; };
    return std::all_of(storage_.data(), data(), is_zero) &&
           std::all_of(data() + n_ * SizeOf(dtype_), storage_.data() + storage_.size(), is_zero);
  }

 private:
  static constexpr size_t kLine = 64;
  DType dtype_;
  size_t n_;
  std::vector<std::byte> storage_;
  size_t begin_;
};

// A problem that owns its arrays.
struct Problem {
  NormKind kind = NormKind::kRmsNorm;
  double epsilon = 1e-6;
  int64_t rows = 1;
  int64_t dim;
  int64_t group_size;
  DType input_dtype = DType::kFloat32;
  DType output_dtype = DType::kFloat32;
  GatePosition gate_position = GatePosition::kNone;
  bool has_residual = false;
  bool has_gamma = false;
  bool has_beta = false;
  bool round_before_gamma = false;
  double gamma_offset = 0.0;
  bool stream = false;
  size_t misalignment = 1;                                // of input, residual and gate, in elements
  size_t output_misalignment = 1;                         // of output and residual_sum
  std::vector<float> input, residual, gate, gamma, beta;  // the input's and gate's are rounded to input_dtype
};

struct Answer {
  Elements output;
  Elements residual_sum;
  std::vector<float> inverse;
  std::vector<float> mean;
  bool operator==(const Answer& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    };
    return output == other.output && residual_sum == other.residual_sum && same(inverse, other.inverse) &&
           same(mean, other.mean);
  }
};

// The answer to p that `run` writes, given its arguments.
template <class Run>
Answer NormalizeBy(const Problem& p, const Run& run) {
  const size_t n = static_cast<size_t>(p.rows * p.dim);
  const size_t groups = static_cast<size_t>(p.rows * (p.dim / p.group_size));
  const bool gated = p.gate_position != GatePosition::kNone;
  const Elements input(p.input_dtype, p.input, p.misalignment);
  const Elements residual(p.input_dtype, p.has_residual ? p.residual : std::vector<float>(), p.misalignment);
  const Elements gate(p.input_dtype, gated ? p.gate : std::vector<float>(), p.misalignment);
  Answer answer{Elements(p.output_dtype, n, p.output_misalignment),
                Elements(p.input_dtype, p.has_residual ? n : 0, p.output_misalignment), std::vector<float>(groups),
                std::vector<float>(groups)};
  NormalizeRowsArgs args = {.kind = p.kind,
                            .gate_position = p.gate_position,
                            .round_before_gamma = p.round_before_gamma,
                            .epsilon = p.epsilon,
                            .gamma_offset = p.gamma_offset,
                            .dim = p.dim,
                            .group_size = p.group_size,
                            .input_dtype = p.input_dtype,
                            .output_dtype = p.output_dtype,
                            .input = input.data(),
                            .output = answer.output.data(),
                            .inverse = answer.inverse.data(),
                            .mean = answer.mean.data(),
                            .stream_output = p.stream};
  if (p.has_residual) {
    args.residual = residual.data();
    args.residual_sum = answer.residual_sum.data();
  }
  if (gated) args.gate = gate.data();
  if (p.has_gamma) args.gamma = p.gamma.data();
  if (p.has_beta) args.beta = p.beta.data();
  run(args);
  EXPECT_TRUE(answer.output.EdgesAreUntouched());
  EXPECT_TRUE(answer.residual_sum.EdgesAreUntouched());
  return answer;
}

inline Answer Normalize(const Problem& p, int64_t row_begin = 0, int64_t row_end = -1) {
  return NormalizeBy(
      p, [&](const NormalizeRowsArgs& args) { NormalizeRows(args, row_begin, row_end < 0 ? p.rows : row_end); });
}

inline Answer Normalize(const Arena& arena, const Problem& p) {
  return NormalizeBy(p, [&](const NormalizeRowsArgs& args) { NormalizeRows(arena, args, p.rows); });
}

// Checks that every target of this CPU gives the bits of the scalar twin, which it returns.
inline Answer CheckEveryTarget(const Problem& p) {
  std::vector<Answer> answers;
  ForEachSimd([&](Simd) {
    answers.push_back(Normalize(p));
    EXPECT_TRUE(answers.back() == answers.front());
  });
  EXPECT_EQ(SupportedSimd().front(), Simd::kScalar);
  return std::move(answers.front());
}

inline Problem RandomProblem(int64_t rows, int64_t dim, DType input_dtype, DType output_dtype, uint32_t seed = 1) {
  Problem p = {.rows = rows, .dim = dim, .group_size = dim, .input_dtype = input_dtype, .output_dtype = output_dtype};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const size_t n = static_cast<size_t>(rows * dim);
  for (size_t i = 0; i < n; ++i) p.input.push_back(RoundTo(input_dtype, 3 * normal(random)));
  for (size_t i = 0; i < n; ++i) p.residual.push_back(RoundTo(input_dtype, normal(random)));
  for (size_t i = 0; i < n; ++i) p.gate.push_back(RoundTo(input_dtype, 2 * normal(random)));
  for (int64_t i = 0; i < dim; ++i) p.gamma.push_back(1 + 0.5f * normal(random));
  for (int64_t i = 0; i < dim; ++i) p.beta.push_back(normal(random));
  return p;
}

inline Problem Given(DType dtype, const std::vector<float>& input, double epsilon) {
  const int64_t dim = static_cast<int64_t>(input.size());
  return {
      .epsilon = epsilon, .dim = dim, .group_size = dim, .input_dtype = dtype, .output_dtype = dtype, .input = input};
}

// `value` rounded to nearest even, by its last place, without any of dtype.cc.
inline long double Rounded(DType dtype, long double value) {
  const long double unit = UlpAt(dtype, value);
  return std::nearbyint(value / unit) * unit;
}

inline long double Silu(long double x) { return x / (1 + std::exp(-x)); }

// The formulas of normalize_rows.h in long double, sums from left to right. Checks `answer` against them: RMSNorm
// within 0.501 units of the last place, LayerNorm within what its mean may cancel besides (N3). Returns the greatest
// error.
inline long double CheckAgainstReference(const Problem& p, const Answer& answer) {
  long double worst = 0;
  for (int64_t first = 0; first < p.rows * p.dim; first += p.group_size) {
    const int64_t n = p.group_size;
    std::vector<long double> x(static_cast<size_t>(n));
    long double sum = 0, largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const size_t at = static_cast<size_t>(first + i);
      long double value = p.input[at];
      if (p.has_residual) {
        value = Rounded(p.input_dtype, value + p.residual[at]);
        EXPECT_EQ(answer.residual_sum[at], value);
      }
      if (p.gate_position == GatePosition::kFirst) value *= Silu(p.gate[at]);
      x[static_cast<size_t>(i)] = value;
      sum += value;
      largest = std::max(largest, std::fabs(value));
    }
    const long double mean = p.kind == NormKind::kLayerNorm ? sum / static_cast<long double>(n) : 0;
    long double squares = 0;
    for (const long double value : x) squares += (value - mean) * (value - mean);
    const long double variance = squares / static_cast<long double>(n) + p.epsilon;
    const long double r = variance == 0 ? 0 : 1 / std::sqrt(variance);
    const size_t group = static_cast<size_t>(first / n);
    EXPECT_LE(UlpError(DType::kFloat32, answer.inverse[group], r), 0.501L);
    if (p.kind == NormKind::kLayerNorm) {
      EXPECT_NEAR(answer.mean[group], mean, largest * 1e-7);
    }
    const bool rounds = p.round_before_gamma && p.input_dtype != DType::kFloat32;
    for (int64_t i = 0; i < n; ++i) {
      const size_t at = static_cast<size_t>(first + i), column = static_cast<size_t>((first + i) % p.dim);
      long double y = (x[static_cast<size_t>(i)] - mean) * r;
      if (rounds) y = Rounded(p.input_dtype, y);
      const long double gamma = p.has_gamma ? p.gamma[column] + static_cast<long double>(p.gamma_offset) : 1;
      const long double beta = p.has_beta ? p.beta[column] : 0;
      y = y * gamma + beta;
      long double allowed = 0.501L;
      if (p.kind == NormKind::kLayerNorm) {
        const long double cancelled =
            (static_cast<long double>(p.dim) / 16 + 8) * 0x1p-52L * (largest * r * std::fabs(gamma) + std::fabs(beta));
        allowed += cancelled / UlpAt(p.output_dtype, y);
      }
      if (p.gate_position == GatePosition::kLast) {
        if (rounds) y = Rounded(p.input_dtype, y);
        y *= Silu(p.gate[at]);
      }
      const long double error = UlpError(p.output_dtype, answer.output[at], y);
      EXPECT_LE(error, allowed) << "element " << at;
      worst = std::max(worst, error);
    }
  }
  return worst;
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_KERNELS_NORMALIZE_ROWS_TESTING_H_
