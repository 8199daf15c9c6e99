// N5 by exhaustion: every element function on every float32 there is, all 2³² patterns of bits, in units of the last place
// of the exact value. Takes minutes: label "slow".
//
// What is exact is computed in float64 by the C library, with other formulas than the kernels': its exp is good to 1 unit
// of float64, its erfc to 5, and the rounded argument of an exponential adds at most 2·|argument| ≤ 210 units of float64,
// 2⁻⁵³ each: some 10⁻⁶ of float32's, which the test takes note of by comparing with long double at a stride.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <mutex>
#include <numbers>
#include <string>
#include <vector>

#include "lib/base/parallel.h"
#include "lib/kernels/activation.h"
#include "lib/kernels/simd.h"

namespace layerd {
namespace {

// Correct rounding is ½. N5 promises 2; what float64 inside leaves is far below.
constexpr double kBudget = 0.5001;
constexpr double kReferenceBudget = 0.00001;
constexpr double kWrong = 1e300;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kOverflows = 0x1.ffffffp127;  // what rounds to infinity in float32
constexpr int64_t kValues = int64_t{1} << 32;
constexpr int64_t kChunk = int64_t{1} << 16;

// x·σ(y), in Float; the limit where x·0 would be NaN.
template <typename Float>
Float TimesSigma(Float x, Float y) {
  if (std::isinf(y) && y < 0) return std::copysign(Float{0}, x);
  return x / (1 + std::exp(-y));
}

template <Activation kKind, typename Float>
Float Exact(Float x) {
  switch (kKind) {
    case Activation::kIdentity:
      return x;
    case Activation::kSigmoid:
      return TimesSigma(Float{1}, x);
    case Activation::kRelu:
      return x <= 0 ? 0 : x;
    case Activation::kReluSquared:
      return x <= 0 ? 0 : x * x;
    case Activation::kGelu:
      if (std::isinf(x) && x < 0) return -Float{0};
      return x * (std::erfc(-x / std::numbers::sqrt2_v<Float>) / 2);
    case Activation::kGeluTanh: {
      const Float twice = 2 * std::sqrt(2 * std::numbers::inv_pi_v<Float>);
      return TimesSigma(x, twice * (x + static_cast<Float>(0.044715L) * x * x * x));
    }
    case Activation::kQuickGelu:
      return TimesSigma(x, static_cast<Float>(1.702L) * x);
    case Activation::kSilu:
      return TimesSigma(x, x);
  }
  return x;
}

// |got − want| in units of float32's last place at `want`; kWrong where a sign, a NaN or an infinity is wrong.
double Ulps(double got, double want) {
  if (std::isnan(want) || std::isnan(got)) return std::isnan(want) && std::isnan(got) ? 0 : kWrong;
  if (std::signbit(got) != std::signbit(want)) return kWrong;
  if (std::fabs(want) >= kOverflows) return std::isinf(got) ? 0 : kWrong;
  const double power = std::bit_cast<double>(std::bit_cast<uint64_t>(want) & (uint64_t{0x7FF} << 52));
  return std::isinf(got) ? kWrong : std::fabs(got - want) * (0x1p23 / std::max(power, 0x1p-126));
}

struct Worst {
  int64_t values = 0;
  double ulps = 0;
  float at = 0;

  void Add(int64_t count, double error, float x) {
    values += count;
    if (!(error <= ulps)) ulps = error, at = x;
  }
};

// The values of one chunk after the other, on all CPUs.
template <typename Check>
Worst Sweep(const Check& check) {
  Worst all;
  std::mutex mutex;
  Arena(AvailableCpus()).For(kValues / kChunk, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> in(kChunk), out(kChunk);
    Worst worst;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      for (int64_t i = 0; i < kChunk; ++i) in[i] = std::bit_cast<float>(static_cast<uint32_t>(chunk * kChunk + i));
      check(in, out, worst);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    all.Add(worst.values, worst.ulps, worst.at);
  });
  return all;
}

template <Activation kKind>
void ExpectRoundedOnce(const char* name) {
  const Worst worst = Sweep([](const std::vector<float>& in, std::vector<float>& out, Worst& so_far) {
    ApplyActivation({kKind}, in.data(), out.data(), kChunk);
    for (int64_t i = 0; i < kChunk; ++i) so_far.Add(1, Ulps(out[i], Exact<kKind, double>(in[i])), in[i]);
  });
  std::printf("%s: %" PRId64 " values, at most %.9f ulp, at %a\n", name, worst.values, worst.ulps, worst.at);
  EXPECT_EQ(worst.values, kValues);
  EXPECT_LE(worst.ulps, kBudget) << "at " << worst.at;

  Worst of_reference;
  constexpr int64_t kStride = 1021;
  for (int64_t bits = 0; bits < kValues; bits += kStride) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    const double got = Exact<kKind, double>(x);
    const double rounded = std::fabs(got) >= kOverflows ? std::copysign(kInfinity, got) : got;
    of_reference.Add(1, Ulps(rounded, static_cast<double>(Exact<kKind, long double>(x))), x);
  }
  std::printf("  the float64 that this is taken against: %" PRId64 " values, within %.9f ulp of long double\n",
              of_reference.values, of_reference.ulps);
  EXPECT_LE(of_reference.ulps, kReferenceBudget) << "at " << of_reference.at;
}

TEST(ActivationSweepTest, Identity) { ExpectRoundedOnce<Activation::kIdentity>("identity"); }
TEST(ActivationSweepTest, Sigmoid) { ExpectRoundedOnce<Activation::kSigmoid>("sigmoid"); }
TEST(ActivationSweepTest, Relu) { ExpectRoundedOnce<Activation::kRelu>("relu"); }
TEST(ActivationSweepTest, ReluSquared) { ExpectRoundedOnce<Activation::kReluSquared>("relu squared"); }
TEST(ActivationSweepTest, Gelu) { ExpectRoundedOnce<Activation::kGelu>("gelu"); }
TEST(ActivationSweepTest, GeluTanh) { ExpectRoundedOnce<Activation::kGeluTanh>("gelu_tanh"); }
TEST(ActivationSweepTest, QuickGelu) { ExpectRoundedOnce<Activation::kQuickGelu>("quick_gelu"); }
TEST(ActivationSweepTest, Silu) { ExpectRoundedOnce<Activation::kSilu>("silu"); }

}  // namespace
}  // namespace layerd
