// The FeedForward layer, gated (Shazeer 2020: SwiGLU, GEGLU, ReGLU, GLU, bilinear) and plain, in every dense form that
// real models use, as independent options.
//
//   gated:  hidden = act(min(x·Wg + bg, gate_max)) ⊙ (clamp(x·Wu + bu, ±up_limit) + up_offset)
//   plain:  hidden = act(x·Wu + bu)
//   both:   y = norm(hidden)·Wd + bd, where norm is the inner norm (BitNet) or nothing
//
// x is [rows, d], gate and up are [rows, h], y is [rows, d_out]; d_out is d in every model but need not be. Products
// are N4's, element functions N5's; everything inside is float32 and y is rounded to the output's dtype once.
//
// Threads: pure functions; the work is divided over the arena.
#ifndef LAYERD_LIB_LAYERS_FEED_FORWARD_H_
#define LAYERD_LIB_LAYERS_FEED_FORWARD_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/statusor.h"
#include "lib/base/parallel.h"
#include "lib/base/tensor.h"
#include "lib/kernels/activation.h"
#include "lib/kernels/matmul.h"

namespace layerd {

enum class FeedForwardForm : uint8_t { kGated, kPlain };

// How a gated layer's gate and up weights come: as two matrices; as one whose first half of outputs is the gate (Phi-3,
// GLM); as one whose even outputs are the gate and odd ones up (gpt-oss).
enum class GateUpPacking : uint8_t { kSeparate, kHalves, kInterleaved };

// RMSNorm with weight between hidden and down.
inline constexpr double kDefaultInnerNormEpsilon = 1e-6;
struct InnerNorm {
  std::optional<double> epsilon;  // default kDefaultInnerNormEpsilon
};

struct FeedForwardSpec {
  FeedForwardForm form = FeedForwardForm::kGated;
  ActivationFunction activation{Activation::kSilu};  // β other than 1 with silu only
  GateUpPacking packing = GateUpPacking::kSeparate;  // of the gated form; kSeparate for the plain one
  WeightLayout layout = WeightLayout::kOutIn;        // of every matrix
  std::optional<double> gate_max;                    // positive and finite in float32
  std::optional<double> up_limit;                    // positive and finite in float32
  double up_offset = 0.0;                            // finite in float32
  std::optional<InnerNorm> inner_norm;
};

// Matrices and biases in any float dtype, each its own. Which must be given follows from form and packing.
//
// A matrix may also be int8, [out, in] only, with its scales beside it: w(n, k) = scale[n][k / 32] · q[n][k], which float32
// holds exactly. q is any int8 and the scale any float16, be it negative or not finite: IEEE's rules hold (∞ · 0 is NaN).
struct FeedForwardWeights {
  std::optional<Tensor> gate;              // [h, d] or [d, h]: gated, separate
  std::optional<Tensor> up;                // [h, d] or [d, h]: gated and separate, or plain
  std::optional<Tensor> gate_up;           // [2h, d] or [d, 2h]: gated, packed
  std::optional<Tensor> down;              // [d_out, h] or [h, d_out]
  std::optional<Tensor> gate_scale;        // float16 [h, ⌈d/32⌉]: of an int8 gate
  std::optional<Tensor> up_scale;          // float16 [h, ⌈d/32⌉]: of an int8 up
  std::optional<Tensor> gate_up_scale;     // float16 [2h, ⌈d/32⌉]: of an int8 gate_up
  std::optional<Tensor> down_scale;        // float16 [d_out, ⌈h/32⌉]: of an int8 down
  std::optional<Tensor> gate_bias;         // [h]
  std::optional<Tensor> up_bias;           // [h]
  std::optional<Tensor> gate_up_bias;      // [2h], packed as the matrix is
  std::optional<Tensor> down_bias;         // [d_out]
  std::optional<Tensor> inner_norm_gamma;  // [h]; optional even with an inner norm
};

struct FeedForwardOutputs {
  Tensor output;                 // [..., d_out]
  std::optional<Tensor> gate;    // [..., h] float32, bias added, before limits; on request, gated only
  std::optional<Tensor> up;      // [..., h] float32, bias added, before limits; on request
  std::optional<Tensor> hidden;  // [..., h] float32, after activation and gating, before the inner norm; on request
  std::optional<Tensor> normed;  // [..., h] float32, after the inner norm; on request, with an inner norm only
};

struct FeedForwardExtent {
  int64_t rows;
  int64_t dim;         // d
  int64_t hidden_dim;  // h
  int64_t out_dim;     // d_out
};

// INVALID_ARGUMENT with the path of the field ("weights.gate.shape", …) when spec, weights and input do not fit.
// Nothing is computed and nothing allocated.
absl::StatusOr<FeedForwardExtent> CheckFeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights,
                                                   const Tensor& input);

// Whether a computation is still wanted: asked again and again while it lasts; an error ends it.
using StillWanted = std::function<absl::Status()>;

// Computes. Errors: those of CheckFeedForward; INVALID_ARGUMENT, field "output_dtype", for one that is no float; those of
// `still_wanted`, which is asked before every chunk of rows (a few seconds' work at most, for the widest layers).
// `output_dtype` left out is the input's. The output is written to `place`, unless that is null: it must have room for it
// and overlap no input.
absl::StatusOr<FeedForwardOutputs> FeedForward(const Arena& arena, const FeedForwardSpec& spec,
                                               const FeedForwardWeights& weights, const Tensor& input,
                                               std::optional<DType> output_dtype, bool intermediates,
                                               const StillWanted& still_wanted = nullptr,
                                               const MemoryPlace* place = nullptr);

// Floating-point operations of a call: 2 for each multiply-add of the products; element functions are not counted.
double FeedForwardFlops(const FeedForwardSpec& spec, const FeedForwardExtent& extent);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_FEED_FORWARD_H_
