// One StreamNormalize or StreamFeedForward: each message of the caller is a call of the engine, and its answer a message to
// the caller, in order.
#ifndef LAYERD_SERVER_ROW_STREAM_H_
#define LAYERD_SERVER_ROW_STREAM_H_

#include <cstdint>
#include <memory>

#include "lib/engine/layer_engine.h"
#include "server/admission.h"
#include "server/call_loop.h"

namespace layerd {

// Largest message of a stream but the first: 4 MiB of rows, and what is around them. And how many may be under way: read
// and not answered.
inline constexpr int64_t kMostChunkBytes = (int64_t{4} << 20) + 65536;
inline constexpr int kMostChunks = 3;

// The stream ends itself. Before its first message comes it has memory for the largest that may; after that for kMostChunks
// messages, and for its first one where that is larger. A message for which the engine has no room just now is tried again
// until the stream's deadline. Engine and admission must outlive it.
ServerCall* NewNormalizeStream(LayerEngine& engine, Admission& admission, int64_t max_first_bytes,
                               std::unique_ptr<CallArrival> arrival);
ServerCall* NewFeedForwardStream(LayerEngine& engine, Admission& admission, int64_t max_first_bytes,
                                 std::unique_ptr<CallArrival> arrival);

}  // namespace layerd

#endif  // LAYERD_SERVER_ROW_STREAM_H_
