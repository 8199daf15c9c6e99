// A layer as a thing: its options and its weights together, as it lives in a checkpoint, in the layer store and in
// memory.
//
// Every weight has a role: the name of its field in the messages of proto/layerd/v1 ("gamma"; "gate", "down_bias"). A
// layer may also be an outline, whose weights have dtype and shape but no data (Tensor::WithoutData).
//
// Threads: pure functions.
#ifndef LAYERD_LIB_LAYERS_LAYER_H_
#define LAYERD_LIB_LAYERS_LAYER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"
#include "lib/layers/quantization.h"

namespace layerd {

struct NormalizeWeights {
  std::optional<Tensor> gamma;  // [d]; every layer has one
  std::optional<Tensor> beta;   // [d]
};

struct NormalizeLayer {
  NormalizeSpec spec;
  NormalizeWeights weights;
};

struct FeedForwardLayer {
  FeedForwardSpec spec;
  FeedForwardWeights weights;
  std::optional<Quantization> quantization = std::nullopt;  // of a layer with int8 matrices, where it is known
};

using Layer = std::variant<NormalizeLayer, FeedForwardLayer>;

// The roles and the members they name, in the order in which the content hash takes them.
inline constexpr std::pair<std::string_view, std::optional<Tensor> NormalizeWeights::*> kNormalizeRoles[] = {
    {"gamma", &NormalizeWeights::gamma},
    {"beta", &NormalizeWeights::beta},
};
inline constexpr std::pair<std::string_view, std::optional<Tensor> FeedForwardWeights::*> kFeedForwardRoles[] = {
    {"gate", &FeedForwardWeights::gate},
    {"gate_scale", &FeedForwardWeights::gate_scale},
    {"up", &FeedForwardWeights::up},
    {"up_scale", &FeedForwardWeights::up_scale},
    {"gate_up", &FeedForwardWeights::gate_up},
    {"gate_up_scale", &FeedForwardWeights::gate_up_scale},
    {"down", &FeedForwardWeights::down},
    {"down_scale", &FeedForwardWeights::down_scale},
    {"gate_bias", &FeedForwardWeights::gate_bias},
    {"up_bias", &FeedForwardWeights::up_bias},
    {"gate_up_bias", &FeedForwardWeights::gate_up_bias},
    {"down_bias", &FeedForwardWeights::down_bias},
    {"inner_norm_gamma", &FeedForwardWeights::inner_norm_gamma},
};

// The matrices of a feed-forward layer and their scales.
struct FeedForwardMatrix {
  std::string_view role;
  std::optional<Tensor> FeedForwardWeights::*matrix;
  std::optional<Tensor> FeedForwardWeights::*scale;
};
inline constexpr FeedForwardMatrix kFeedForwardMatrices[] = {
    {"gate", &FeedForwardWeights::gate, &FeedForwardWeights::gate_scale},
    {"up", &FeedForwardWeights::up, &FeedForwardWeights::up_scale},
    {"gate_up", &FeedForwardWeights::gate_up, &FeedForwardWeights::gate_up_scale},
    {"down", &FeedForwardWeights::down, &FeedForwardWeights::down_scale},
};

// Whether the weight has the scales of an int8 matrix, which are no parameters.
constexpr bool IsScale(std::string_view role) {
  constexpr std::string_view kEnding = "_scale";
  return role.size() > kEnding.size() && role.substr(role.size() - kEnding.size()) == kEnding;
}

// The weights that `layer` has, in that order.
std::vector<std::pair<std::string_view, Tensor>> WeightsOf(const Layer& layer);

// Gives `layer` a weight. INVALID_ARGUMENT, field "weights.<role>", for a role that such a layer does not have.
absl::Status SetWeight(Layer& layer, std::string_view role, Tensor tensor);

struct LayerExtent {
  int64_t dim;           // d, the last dimension of its input
  int64_t hidden_dim;    // h; 0 for a norm
  int64_t out_dim;       // d_out; d for a norm
  int64_t parameters;    // elements of all weights but scales
  int64_t weight_bytes;  // bytes of all weights
};

// Whether options and weights fit each other for input of any dtype: a norm must have γ and say its rounding. Looks at
// no element, so an outline will do. INVALID_ARGUMENT with the path of the field ("spec.rounding", "weights.up.shape",
// "quantization.rows").
absl::StatusOr<LayerExtent> CheckLayer(const Layer& layer);

// The same layer without its weights' data.
Layer OutlineOf(const Layer& layer);

// Makes weights that are scattered (lib/base/tensor.h) lie in one piece each, and gives back what they lay in. Throws
// std::bad_alloc. Threads: as of any change.
void GatherWeights(FeedForwardWeights& weights);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_LAYER_H_
