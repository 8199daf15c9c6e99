#include "lib/layers/seeded.h"

#include <cmath>
#include <utility>

namespace layerd {
namespace {

uint64_t Fnv1a64(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

uint64_t SplitMix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

Shape MatrixShape(WeightLayout layout, int64_t in, int64_t out) {
  return layout == WeightLayout::kOutIn ? Shape{out, in} : Shape{in, out};
}

}  // namespace

Tensor SeededTensor(uint64_t seed, std::string_view name, DType dtype, Shape shape, double scale, double offset) {
  Tensor tensor = Tensor::Allocate(dtype, std::move(shape));
  const uint64_t key = seed ^ Fnv1a64(name);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const uint64_t z = SplitMix64(key + (static_cast<uint64_t>(i) + 1) * 0x9E3779B97F4A7C15u);
    const double unit = (static_cast<double>(z >> 40) - 0x1p23) * 0x1p-23;
    StoreFromFloat(dtype, static_cast<float>(offset + unit * scale), tensor.mutable_data(), i);
  }
  return tensor;
}

Tensor SeededInput(uint64_t seed, DType dtype, Shape shape) {
  return SeededTensor(seed, "input", dtype, std::move(shape), std::sqrt(3.0));
}

Tensor SeededGamma(uint64_t seed, DType dtype, int64_t dim) {
  return SeededTensor(seed, "gamma", dtype, {dim}, 0.1, 1.0);
}

Tensor SeededBeta(uint64_t seed, DType dtype, int64_t dim) { return SeededTensor(seed, "beta", dtype, {dim}, 0.1); }

FeedForwardWeights SeededFeedForwardWeights(uint64_t seed, const FeedForwardSpec& spec, DType dtype, int64_t dim,
                                            int64_t hidden_dim, bool biases) {
  const auto matrix = [&](std::string_view name, int64_t in, int64_t out) {
    return SeededTensor(seed, name, dtype, MatrixShape(spec.layout, in, out), std::sqrt(3.0 / static_cast<double>(in)));
  };
  const auto bias = [&](std::string_view name, int64_t size) { return SeededTensor(seed, name, dtype, {size}, 0.1); };
  FeedForwardWeights weights;
  const bool gated = spec.form == FeedForwardForm::kGated;
  if (gated && spec.packing != GateUpPacking::kSeparate) {
    weights.gate_up = matrix("gate_up", dim, 2 * hidden_dim);
    if (biases) weights.gate_up_bias = bias("gate_up_bias", 2 * hidden_dim);
  } else {
    if (gated) {
      weights.gate = matrix("gate", dim, hidden_dim);
      if (biases) weights.gate_bias = bias("gate_bias", hidden_dim);
    }
    weights.up = matrix("up", dim, hidden_dim);
    if (biases) weights.up_bias = bias("up_bias", hidden_dim);
  }
  weights.down = matrix("down", hidden_dim, dim);
  if (biases) weights.down_bias = bias("down_bias", dim);
  if (spec.inner_norm) weights.inner_norm_gamma = SeededTensor(seed, "inner_norm_gamma", dtype, {hidden_dim}, 0.1, 1.0);
  return weights;
}

FeedForwardSpec SwiGluSpec() { return FeedForwardSpec{}; }

FeedForwardSpec ReluSpec() {
  FeedForwardSpec spec;
  spec.form = FeedForwardForm::kPlain;
  spec.activation = {Activation::kRelu};
  return spec;
}

}  // namespace layerd
