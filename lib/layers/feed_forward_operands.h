// What a feed-forward layer computes with, wherever its weights come from, and the computation itself.
//
// Threads: pure functions; the work is divided over the arena.
#ifndef LAYERD_LIB_LAYERS_FEED_FORWARD_OPERANDS_H_
#define LAYERD_LIB_LAYERS_FEED_FORWARD_OPERANDS_H_

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "lib/kernels/product.h"
#include "lib/layers/feed_forward.h"

namespace layerd {

struct FeedForwardOperands {
  std::optional<Factor> gate;  // of the gated form
  Factor up;
  Factor down;
  const float* inner_norm_gamma = nullptr;
};

// The gate's, up's and down's weights as a matrix each, whatever the packing. Data may be missing.
WeightView GateViewOf(const FeedForwardSpec& spec, const FeedForwardWeights& weights);
WeightView UpViewOf(const FeedForwardSpec& spec, const FeedForwardWeights& weights);
WeightView DownViewOf(const FeedForwardSpec& spec, const FeedForwardWeights& weights);

// The gate's and up's biases, widened and each for itself.
class GateUpBiases {
 public:
  GateUpBiases(const FeedForwardSpec& spec, const FeedForwardWeights& weights);
  // Null where there is none.
  const float* gate() const { return gate_.empty() ? nullptr : gate_.data(); }
  const float* up() const { return up_.empty() ? nullptr : up_.data(); }

 private:
  std::vector<float> gate_, up_;
};

// The layer of feed_forward.h, for checked operands and input. Errors: INVALID_ARGUMENT for an output dtype that is no
// float, and those of `still_wanted`.
absl::StatusOr<FeedForwardOutputs> ComputeFeedForward(const Arena& arena, const FeedForwardSpec& spec,
                                                      const FeedForwardExtent& extent,
                                                      const FeedForwardOperands& operands, const Tensor& input,
                                                      std::optional<DType> output_dtype, bool intermediates,
                                                      const StillWanted& still_wanted, const MemoryPlace* place);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_FEED_FORWARD_OPERANDS_H_
