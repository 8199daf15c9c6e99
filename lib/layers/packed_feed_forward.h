// A feed-forward layer ready to be computed again and again: its matrices packed into panels (lib/kernels/panels.h), its
// biases and γ widened. The weights exist once, packed; Unpacked() makes them again for whoever must see them.
//
// It is filled by pieces, in any order, so that a layer can be read from a file straight into its panels:
//
//   PackedFeedForward packed(spec, outline);         // dtypes and shapes; checked by CheckFeedForward before
//   for each weight, for each run of its rows: packed.Put(role, first_row, rows, bytes);
//
// and gives the same bits as the layer's own weights would.
//
// Threads: const access from any number of threads; Put() from several at once for runs of rows that do not overlap,
// where each run begins at a multiple of 32 rows of an [out, in] matrix (64 of one with interleaved gate and up).
#ifndef LAYERD_LIB_LAYERS_PACKED_FEED_FORWARD_H_
#define LAYERD_LIB_LAYERS_PACKED_FEED_FORWARD_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/base/parallel.h"
#include "lib/kernels/panels.h"
#include "lib/layers/feed_forward.h"

namespace layerd {

class PackedFeedForward {
 public:
  // Memory for a layer of which `outline` tells dtypes and shapes (its data is not looked at). Spec and outline must have
  // passed CheckFeedForward(). Throws std::bad_alloc.
  PackedFeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& outline);
  // The same, filled from weights in memory; the work is divided over the arena.
  static PackedFeedForward Of(const Arena& arena, const FeedForwardSpec& spec, const FeedForwardWeights& weights);

  // Bytes that such a layer takes.
  static int64_t BytesOf(const FeedForwardSpec& spec, const FeedForwardWeights& outline);

  // Takes rows first_row … first_row + rows − 1 of the weight `role` (elements of a vector), dense and little-endian as
  // in a Tensor of the outline's dtype and shape. `role` is one of kFeedForwardRoles that the outline has.
  void Put(std::string_view role, int64_t first_row, int64_t rows, const std::byte* bytes);

  // The reverse: gives such rows again, bit for bit, into memory for them.
  void Get(std::string_view role, int64_t first_row, int64_t rows, std::byte* bytes) const;

  // The layer's weights again, bit for bit. Throws std::bad_alloc.
  FeedForwardWeights Unpacked() const;

  const FeedForwardSpec& spec() const { return spec_; }
  // Dtypes and shapes of the weights; matrices without data.
  const FeedForwardWeights& outline() const { return outline_; }
  const FeedForwardExtent& extent() const { return extent_; }  // rows: 0

  // What the computation takes; an empty one where the layer has none.
  const Panels& gate() const { return gate_; }
  const Panels& up() const { return up_; }
  const Panels& down() const { return down_; }
  const float* gate_bias() const { return DataOf(gate_bias_); }
  const float* up_bias() const { return DataOf(up_bias_); }
  const float* down_bias() const { return DataOf(down_bias_); }
  const float* inner_norm_gamma() const { return DataOf(inner_norm_gamma_); }

 private:
  void PutVector(std::string_view role, Tensor& tensor, int64_t first, int64_t count, const std::byte* bytes);
  // Calls visit(panels, part, first_in, first_out), as for Panels::Pack(), with what rows of a matrix at `bytes` are parts
  // of: of one member's panels, or of the gate's and the up's.
  template <typename Visit>
  void ForEachPart(std::string_view role, const Tensor& tensor, int64_t first_row, int64_t rows, const std::byte* bytes,
                   const Visit& visit) const;
  static const float* DataOf(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

  FeedForwardSpec spec_;
  FeedForwardWeights outline_;
  FeedForwardExtent extent_{};
  Panels gate_, up_, down_;
  std::vector<float> gate_bias_, up_bias_, down_bias_, inner_norm_gamma_;
};

// Computes as FeedForward() does, with the same bits. INVALID_ARGUMENT where the input does not fit.
absl::StatusOr<FeedForwardOutputs> FeedForward(const Arena& arena, const PackedFeedForward& layer, const Tensor& input,
                                               std::optional<DType> output_dtype, bool intermediates,
                                               const StillWanted& still_wanted = nullptr,
                                               const MemoryPlace* place = nullptr);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_PACKED_FEED_FORWARD_H_
