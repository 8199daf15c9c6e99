// The messages of StreamNormalize and StreamFeedForward as calls. Threads: pure functions.
#ifndef LAYERD_WIRE_STREAM_CODEC_H_
#define LAYERD_WIRE_STREAM_CODEC_H_

#include <optional>

#include "absl/status/statusor.h"
#include "layerd/v1/layer_service.pb.h"
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

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_STREAM_CODEC_H_
