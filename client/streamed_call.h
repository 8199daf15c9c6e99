// One call sent as a stream of its rows, so that no message grows with it, and its answer put together again. A row's
// bits depend on that row alone (N1), so they are those of the call in one message.
//
// Threads: any; the call waits on the caller's.
#ifndef LAYERD_CLIENT_STREAMED_CALL_H_
#define LAYERD_CLIENT_STREAMED_CALL_H_

#include <grpcpp/channel.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/row_stream.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

// Bytes of the call's rows, of all tensors that have them; 0 where it cannot be divided, since a row is larger than a
// message may be, or it is not clear what a row is, since no server would take the call.
int64_t DivisibleBytes(const NormalizeCall& call);
int64_t DivisibleBytes(const FeedForwardCall& call);

// The answer to a call that can be divided, its rows sent and answered in messages of about `chunk_bytes`. Beside input
// and output it takes the memory of a few messages. Errors: those of the call in one message; of an engine that is out
// of memory; INTERNAL, reason MALFORMED_ANSWER, where the parts do not fit each other. A layer that is replaced
// meanwhile begins it again, a few times. Cancellation is looked at between messages.
absl::StatusOr<NormalizeResult> CallByStream(const std::shared_ptr<grpc::Channel>& channel, const NormalizeCall& call,
                                             int64_t chunk_bytes);
absl::StatusOr<FeedForwardResult> CallByStream(const std::shared_ptr<grpc::Channel>& channel,
                                               const FeedForwardCall& call, int64_t chunk_bytes);

}  // namespace layerd

#endif  // LAYERD_CLIENT_STREAMED_CALL_H_
