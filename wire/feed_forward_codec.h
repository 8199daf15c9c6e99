// FeedForward calls and answers between their messages and lib: the server decodes requests and encodes responses, the
// client the reverse. Deadline and cancellation do not travel in messages. Threads: pure functions.
#ifndef LAYERD_WIRE_FEED_FORWARD_CODEC_H_
#define LAYERD_WIRE_FEED_FORWARD_CODEC_H_

#include "absl/status/statusor.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/engine/layer_engine.h"
#include "wire/message_storage.h"

namespace layerd::wire {

// The call's tensors share what is in `storage`. INVALID_ARGUMENT with the path of the field.
absl::StatusOr<FeedForwardCall> DecodeCall(const v1::FeedForwardRequest& request, const ReceivedStorage& storage);
// What is large of its tensors goes into `storage`, here and below. `output_memory` is not sent where the receiver does not
// have it.
void EncodeCall(const FeedForwardCall& call, v1::FeedForwardRequest& request, SentStorage& storage);

void EncodeResult(const FeedForwardResult& result, v1::FeedForwardResponse& response, SentStorage& storage);
absl::StatusOr<FeedForwardResult> DecodeResult(const v1::FeedForwardResponse& response, const ReceivedStorage& storage);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_FEED_FORWARD_CODEC_H_
