// Deterministic pseudo-random tensors and layers, the same in every language.
//
// Element i (from 0) of the tensor `name` under `seed` is, in 64-bit unsigned arithmetic that wraps:
//
//   fnv1a64(name): h = 14695981039346656037; for each byte of the name: h = (h xor byte) · 1099511628211
//   key   = seed xor fnv1a64(name)
//   z     = key + (i + 1) · 0x9E3779B97F4A7C15               from here SplitMix64 (Steele, Lea & Flood 2014)
//   z     = (z xor (z >> 30)) · 0xBF58476D1CE4E5B9
//   z     = (z xor (z >> 27)) · 0x94D049BB133111EB
//   z     = z xor (z >> 31)
//   unit  = ((z >> 40) − 2²³) / 2²³                          uniform in [−1, 1), exact in float32
//   value = offset + unit · scale                            in float64, rounded to float32, then to the tensor's dtype
//
// Scale √3 for inputs ("input": unit variance); √(3/k) for a matrix whose products sum over k ("gate", "up", "gate_up",
// "down": unit variance through a linear layer); 0.1 for biases ("gate_bias", "up_bias", "gate_up_bias", "down_bias")
// and "beta". Scale 0.1 and offset 1 for "gamma" and "inner_norm_gamma"; the offset is 0 everywhere else. √ is IEEE's, in
// float64. docs/seeded.md has the first values.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_LAYERS_SEEDED_H_
#define LAYERD_LIB_LAYERS_SEEDED_H_

#include <cstdint>
#include <string_view>

#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"

namespace layerd {

// offset + unit · scale for every element of `shape`, which must have passed NumElements().
Tensor SeededTensor(uint64_t seed, std::string_view name, DType dtype, Shape shape, double scale, double offset = 0.0);

// The tensor "input".
Tensor SeededInput(uint64_t seed, DType dtype, Shape shape);
// The tensors "gamma" and "beta" of a norm.
Tensor SeededGamma(uint64_t seed, DType dtype, int64_t dim);
Tensor SeededBeta(uint64_t seed, DType dtype, int64_t dim);

// Weights that `spec` asks for, with or without biases, for d → h → d. The sizes must be at least 1.
FeedForwardWeights SeededFeedForwardWeights(uint64_t seed, const FeedForwardSpec& spec, DType dtype, int64_t dim,
                                            int64_t hidden_dim, bool biases);

// SwiGLU, weights [out, in], no biases.
FeedForwardSpec SwiGluSpec();
// ReLU, plain, weights [out, in], no biases.
FeedForwardSpec ReluSpec();

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_SEEDED_H_
