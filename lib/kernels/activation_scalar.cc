// The scalar twin of activation.cc: the same operations in the same order, so the same bits.
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

#include "lib/kernels/activation_constants.h"
#include "lib/kernels/activation_internal.h"

namespace layerd {
namespace {

template <size_t kCount>
double Polynomial(const double (&highest_first)[kCount], double x) {
  double sum = highest_first[0];
  for (size_t i = 1; i < kCount; ++i) sum = std::fma(sum, x, highest_first[i]);
  return sum;
}

double ExpNonPositive(double y) {
  if (y < kExpLowest) y = kExpLowest;
  const double shifted = std::fma(y, kLog2E, kRoundToInteger);
  const double k = shifted - kRoundToInteger;
  double r = std::fma(-k, kLn2High, y);
  r = std::fma(-k, kLn2Low, r);
  const uint64_t exponent = std::bit_cast<uint64_t>(shifted) + static_cast<uint64_t>(kExponentBias);
  return Polynomial(kExpPolynomial, r) * std::bit_cast<double>(exponent << kMantissaBits);
}

double TimesSigma(double x, double y) {
  const double z = ExpNonPositive(-std::fabs(y));
  if (y == -std::numeric_limits<double>::infinity()) x = std::copysign(0.0, x);
  return x * (y < 0 ? z : 1.0) / (1.0 + z);
}

double TimesPhi(double x) {
  const double t = std::fabs(x);
  const double e = ExpNonPositive(-0.5 * (t * t));
  const double held = t > kMillsLargest ? kMillsLargest : t;
  const double inverse = 1.0 / (held + kMillsK);
  const double tail = e * (Polynomial(kMillsPolynomial, (held - kMillsK) * inverse) * inverse);
  if (x == -std::numeric_limits<double>::infinity()) x = -0.0;
  return x * (x < 0 ? tail : 1.0 - tail);
}

double Activate(const ActivationFunction& act, double x) {
  switch (act.kind) {
    case Activation::kIdentity:
      return x;
    case Activation::kSigmoid:
      return TimesSigma(1.0, x);
    case Activation::kRelu:
      return x <= 0 ? 0.0 : x;
    case Activation::kReluSquared:
      return x <= 0 ? 0.0 : x * x;
    case Activation::kGelu:
      return TimesPhi(x);
    case Activation::kGeluTanh:
      return TimesSigma(x, x * std::fma(kGeluTanhCubic, x * x, kGeluTanhLinear));
    case Activation::kQuickGelu:
      return TimesSigma(x, kQuickGeluSlope * x);
    case Activation::kSilu:
      return act.beta == 0 ? 0.5 * x : TimesSigma(x, act.beta * x);
  }
  return x;
}

double WithOneNan(double value) { return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value; }

}  // namespace

void ApplyGatingScalar(const Gating& gating, const float* gate, const float* up, float* out, int64_t n) {
  const double gate_max = gating.gate_max;
  const double up_limit = gating.up_limit;
  const double up_offset = gating.up_offset == 0 ? -0.0 : gating.up_offset;
  for (int64_t i = 0; i < n; ++i) {
    double x = gate[i];
    if (x > gate_max) x = gate_max;
    double result = Activate(gating.activation, x);
    if (up != nullptr) {
      double u = up[i];
      if (u > up_limit) u = up_limit;
      if (u < -up_limit) u = -up_limit;
      result *= u + up_offset;
    }
    out[i] = static_cast<float>(WithOneNan(result));
  }
}

void ActivateFloat64Scalar(const ActivationFunction& act, const float* in, double* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = WithOneNan(Activate(act, in[i]));
}

}  // namespace layerd
