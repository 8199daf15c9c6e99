// The messages of StreamNormalize and StreamFeedForward as calls. Threads: pure functions.
#ifndef LAYERD_WIRE_STREAM_CODEC_H_
#define LAYERD_WIRE_STREAM_CODEC_H_

#include <optional>

#include "absl/status/statusor.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/base/tensor.h"
#include "lib/engine/layer_engine.h"
#include "wire/message_storage.h"

namespace layerd::wire {

// The call that a message of a stream is. `first` is what the stream's first message says of all of them, without rows;
// that message sets it. INVALID_ARGUMENT with the path of the field, as of DecodeCall(); MISSING and UNEXPECTED_FIELD
// where `call` is not in the first message, or in another.
absl::StatusOr<NormalizeCall> DecodeChunk(const v1::StreamNormalizeRequest& request, const ReceivedStorage& storage,
                                          std::optional<NormalizeCall>& first);
absl::StatusOr<FeedForwardCall> DecodeChunk(const v1::StreamFeedForwardRequest& request, const ReceivedStorage& storage,
                                            std::optional<FeedForwardCall>& first);

// The reverse: the first message, with the rows that the call has; and one more with these.
void EncodeFirstChunk(const NormalizeCall& call, v1::StreamNormalizeRequest& request, SentStorage& storage);
void EncodeFirstChunk(const FeedForwardCall& call, v1::StreamFeedForwardRequest& request, SentStorage& storage);
void EncodeChunk(const Tensor& input, const std::optional<Tensor>& residual, const std::optional<Tensor>& gate,
                 v1::StreamNormalizeRequest& request, SentStorage& storage);
void EncodeChunk(const Tensor& input, v1::StreamFeedForwardRequest& request, SentStorage& storage);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_STREAM_CODEC_H_
