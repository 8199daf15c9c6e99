// Normalize calls and answers between their messages and lib: the server decodes requests and encodes responses, the
// client the reverse. Deadline and cancellation do not travel in messages. Threads: pure functions.
#ifndef LAYERD_WIRE_NORMALIZE_CODEC_H_
#define LAYERD_WIRE_NORMALIZE_CODEC_H_

#include "absl/status/statusor.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/engine/layer_engine.h"
#include "wire/message_storage.h"

namespace layerd::wire {

// The call's tensors share what is in `storage`. INVALID_ARGUMENT with the path of the field.
absl::StatusOr<NormalizeCall> DecodeCall(const v1::NormalizeRequest& request, const ReceivedStorage& storage);
// What is large of its tensors goes into `storage`, here and below. `output_memory` is not sent where the receiver does not
// have it.
void EncodeCall(const NormalizeCall& call, v1::NormalizeRequest& request, SentStorage& storage);

void EncodeResult(const NormalizeResult& result, v1::NormalizeResponse& response, SentStorage& storage);
absl::StatusOr<NormalizeResult> DecodeResult(const v1::NormalizeResponse& response, const ReceivedStorage& storage);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_NORMALIZE_CODEC_H_
