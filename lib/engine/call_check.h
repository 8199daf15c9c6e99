// What tells from shapes alone whether an engine would compute a call.
#ifndef LAYERD_LIB_ENGINE_CALL_CHECK_H_
#define LAYERD_LIB_ENGINE_CALL_CHECK_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

struct CallLimits {
  int64_t max_answer_bytes = int64_t{64} << 20;  // a larger answer is refused
  double max_verify_flops = 1e9;                 // a larger layer is not verified
};

struct CallCost {
  double work;           // about, in multiply-adds by one thread
  int64_t answer_bytes;  // at most
};

// What the call costs. INVALID_ARGUMENT for what does not fit, RESOURCE_EXHAUSTED for what is over a limit, with details.
// Nothing is allocated or computed, and no name looked up. Threads: pure functions.
absl::StatusOr<CallCost> CheckCall(const NormalizeCall& call, const CallLimits& limits);
absl::StatusOr<CallCost> CheckCall(const FeedForwardCall& call, const CallLimits& limits);

// Bytes of the answer for one row of a feed-forward layer.
double AnswerBytesPerRow(const FeedForwardExtent& extent, DType output_dtype, bool intermediates);

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_CALL_CHECK_H_
