// Activation functions, alone and with their gating, in float64 inside and rounded to float32 once (N5: within 2 ulp of
// the exact value over all of float32, tails, signs and denormals included).
//
//   identity x · sigmoid σ(x) = 1/(1 + e⁻ˣ) · relu max(x, 0) · relu² max(x, 0)² · gelu x·Φ(x) (Hendrycks & Gimpel 2016,
//   exact) · gelu_tanh ½x(1 + tanh(√(2/π)(x + 0.044715x³))) = x·σ(2√(2/π)(x + 0.044715x³)) · quick_gelu x·σ(1.702x) ·
//   silu x·σ(βx), β = 1 unless said otherwise (Ramachandran et al. 2017).
//
// Limits are taken, not NaN made from them: silu(−∞) = gelu(−∞) = gelu_tanh(−∞) = quick_gelu(−∞) = −0, and the same
// functions at +∞ are +∞; with β < 0, silu(−∞) = −∞ and silu(+∞) = +0; with β = 0 it is x/2 everywhere. NaN gives NaN for every function, relu included.
//
// Aliasing: `out` may be `gate` or `up` (or `in`) itself, not partly overlapping. No alignment beyond the element's.
// Threads: pure functions.
#ifndef LAYERD_LIB_KERNELS_ACTIVATION_H_
#define LAYERD_LIB_KERNELS_ACTIVATION_H_

#include <cstdint>
#include <limits>

namespace layerd {

enum class Activation : uint8_t { kIdentity, kSigmoid, kRelu, kReluSquared, kGelu, kGeluTanh, kQuickGelu, kSilu };

struct ActivationFunction {
  Activation kind;
  double beta = 1.0;  // of silu only; finite
};

// out[i] = float32(act(in[i])).
void ApplyActivation(const ActivationFunction& act, const float* in, float* out, int64_t n);

// What gated feed-forward layers do between their products (gpt-oss and DeepSeek-V4 use the limits, gpt-oss the
// offset).
struct Gating {
  ActivationFunction activation;
  float gate_max = std::numeric_limits<float>::infinity();  // gate := min(gate, gate_max); NaN stays
  float up_limit = std::numeric_limits<float>::infinity();  // up := clamp(up, ±up_limit); NaN stays
  float up_offset = 0.0f;
};

// out[i] = float32(act(min(gate[i], gate_max)) · (clamp(up[i], ±up_limit) + up_offset)), float64 inside.
void ApplyGating(const Gating& gating, const float* gate, const float* up, float* out, int64_t n);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_ACTIVATION_H_
