// One Normalize or FeedForward: through the gate, in line for memory, received, computed, answered.
#ifndef LAYERD_SERVER_UNARY_CALL_H_
#define LAYERD_SERVER_UNARY_CALL_H_

#include <cstdint>
#include <memory>

#include "lib/base/shared_regions.h"
#include "lib/base/worker_pool.h"
#include "lib/engine/layer_engine.h"
#include "server/admission.h"
#include "server/call_loop.h"

namespace layerd {

// What a call needs of its service; all must outlive it.
struct UnaryCallContext {
  LayerEngine& engine;
  Admission& admission;
  WorkerPool& decoders;
  const SharedRegions* regions;  // null: none
  int64_t max_message_bytes;
};

// The call ends and deletes itself. Until it has memory for the largest message nothing of its own is read.
ServerCall* NewNormalizeCall(const UnaryCallContext& service, std::unique_ptr<CallArrival> arrival);
ServerCall* NewFeedForwardCall(const UnaryCallContext& service, std::unique_ptr<CallArrival> arrival);

}  // namespace layerd

#endif  // LAYERD_SERVER_UNARY_CALL_H_
