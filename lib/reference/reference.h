// Every layer again, as plain float64 loops: the specification as code. Nothing here is fast, shares code with the
// kernels, or depends on an order of summation.
//
// Inputs must have passed the layers' checks. Threads: pure functions.
#ifndef LAYERD_LIB_REFERENCE_REFERENCE_H_
#define LAYERD_LIB_REFERENCE_REFERENCE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"

namespace layerd::reference {

// act(x) in long double, correct to float64 in the tails too.
double Activate(const ActivationFunction& act, double x);

// act(min(gate, gate_max)) · (clamp(up, ±up_limit) + up_offset), limits as the layer has them (float32).
double Gate(const FeedForwardSpec& spec, double gate, double up);

struct NormalizeReference {
  std::vector<double> output;  // exact but for float64's own rounding
  // The other value that `output` has where n lies so near a tie of its rounding to 16 bits that float64 cannot tell
  // which side is right; equal to `output` everywhere else.
  std::vector<double> output_at_tie;
  std::vector<float> residual_sum;  // rounded to the input's dtype; empty without a residual
  std::vector<double> slack;        // what N3 allows beyond 0.501 ulp: 0 for RMSNorm
};
NormalizeReference Normalize(const NormalizeSpec& spec, const NormalizeInputs& inputs);

// y[m][n] = Σₖ x[m][k]·w(n, k) + bias[n].
struct ProductReference {
  std::vector<double> value;      // with the bias
  std::vector<double> magnitude;  // Σₖ |x[m][k]·w(n, k)|
};
ProductReference Product(const std::vector<double>& x, int64_t rows, const Tensor& weights, WeightLayout layout,
                         const std::optional<Tensor>& bias);

struct FeedForwardReference {
  ProductReference gate, up;                   // gate is empty for the plain form
  std::vector<double> hidden, normed, output;  // normed is empty without an inner norm
};
FeedForwardReference FeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights, const Tensor& input);

// Gate and up of a packed matrix or vector, as two.
struct Unpacked {
  Tensor gate, up;
};
Unpacked Unpack(GateUpPacking packing, WeightLayout layout, const Tensor& packed);

}  // namespace layerd::reference

#endif  // LAYERD_LIB_REFERENCE_REFERENCE_H_
