// Every layer again, as plain float64 loops: the specification as code. Nothing here is fast, shares code with the
// kernels, or depends on an order of summation.
//
// Inputs must have passed the layers' checks. Threads: pure functions.
#ifndef LAYERD_LIB_REFERENCE_REFERENCE_H_
#define LAYERD_LIB_REFERENCE_REFERENCE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"

namespace layerd::reference {

// act(x) in long double, correct to float64 in the tails too; not 0 where act(x) is not, however small.
double Activate(const ActivationFunction& act, double x);

// act(min(gate, gate_max)) · (clamp(up, ±up_limit) + up_offset), limits as the layer has them (float32).
double Gate(const FeedForwardSpec& spec, double gate, double up);

struct NormalizeReference {
  std::vector<double> output;  // exact but for float64's own rounding
  // With rounding inside (BEFORE_GAMMA on 16 bits): what else is right, where float64 cannot tell on which side of a tie
  // of that rounding a value lies; where a mean cancels so far that it leaves more than two values of n, all between the
  // outermost too. Empty otherwise.
  struct Right {
    std::array<double, 4> values;
    bool and_between;
  };
  std::vector<Right> right;
  std::vector<float> residual_sum;  // rounded to the input's dtype; empty without a residual
  std::vector<double> slack;        // what N3 allows beyond 0.501 ulp: 0 for RMSNorm without β
};
NormalizeReference Normalize(const NormalizeSpec& spec, const NormalizeInputs& inputs);

// y[m][n] = Σₖ x[m][k]·w(n, k) + bias[n], where w(n, k) of int8 weights is scale[n][k / 32] · q[n][k], exactly.
struct ProductReference {
  std::vector<double> value;      // with the bias
  std::vector<double> magnitude;  // Σₖ |x[m][k]·w(n, k)|
};
ProductReference Product(const std::vector<double>& x, int64_t rows, const Tensor& weights, WeightLayout layout,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& scale = std::nullopt);

struct FeedForwardReference {
  ProductReference gate, up;                   // gate is empty for the plain form
  std::vector<double> hidden, normed, output;  // normed is empty without an inner norm
};
FeedForwardReference FeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights, const Tensor& input);

// Gate and up of a packed matrix or vector, or of the matrix's scales, as two.
struct Unpacked {
  Tensor gate, up;
};
Unpacked Unpack(GateUpPacking packing, WeightLayout layout, const Tensor& packed);

}  // namespace layerd::reference

#endif  // LAYERD_LIB_REFERENCE_REFERENCE_H_
