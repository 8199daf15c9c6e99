// FeedForward calls and answers between their messages and lib: the server decodes requests and encodes responses, the
// client the reverse. Deadline and cancellation do not travel in messages. Threads: pure functions.
#ifndef LAYERD_WIRE_FEED_FORWARD_CODEC_H_
#define LAYERD_WIRE_FEED_FORWARD_CODEC_H_

#include <memory>

#include "absl/status/statusor.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/engine/layer_engine.h"

namespace layerd::wire {

// The call's tensors share the request's bytes and keep `owner` alive. INVALID_ARGUMENT with the path of the field.
absl::StatusOr<FeedForwardCall> DecodeCall(const v1::FeedForwardRequest& request,
                                           const std::shared_ptr<const void>& owner);
void EncodeCall(const FeedForwardCall& call, v1::FeedForwardRequest& request);

void EncodeResult(const FeedForwardResult& result, v1::FeedForwardResponse& response);
absl::StatusOr<FeedForwardResult> DecodeResult(const v1::FeedForwardResponse& response,
                                               const std::shared_ptr<const void>& owner);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_FEED_FORWARD_CODEC_H_
