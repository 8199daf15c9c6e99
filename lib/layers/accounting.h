// What a feed-forward layer costs: parameters, floating-point operations, bytes; and the hidden width that gives a
// gated layer the parameters of a plain one.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_LAYERS_ACCOUNTING_H_
#define LAYERD_LIB_LAYERS_ACCOUNTING_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "lib/base/dtype.h"
#include "lib/layers/feed_forward.h"

namespace layerd {

// ⌊⅔·4·dim⌋ rounded up to a multiple of `multiple_of`: the gated layer's h at which its three matrices hold about as
// much as the two of a plain layer with h = 4·dim (Shazeer 2020; Llama). 4096, 256 → 11008; 512, 1 → 1365.
// INVALID_ARGUMENT, field "dim" or "multiple_of", unless both are from 1 to kMaxDimension.
absl::StatusOr<int64_t> GatedHiddenDim(int64_t dim, int64_t multiple_of);

struct FeedForwardCost {
  int64_t parameters;                // weights and biases
  int64_t flops_per_row;             // 2 for each multiply-add of the products
  int64_t weight_bytes;              // parameters in the weights' dtype; int8: with their scales, biases in float32
  int64_t activation_bytes_per_row;  // input and output in the activations' dtype
};

// Costs of a layer d → h → d. INVALID_ARGUMENT, field "dim" or "hidden_dim", unless both are from 1 to kMaxDimension,
// or when a count does not fit int64.
absl::StatusOr<FeedForwardCost> CostOf(FeedForwardForm form, int64_t dim, int64_t hidden_dim, bool biases,
                                       DType weight_dtype, DType activation_dtype);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_ACCOUNTING_H_
