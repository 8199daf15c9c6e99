// Resident layers between their messages (proto/layerd/v1/layer_registry.proto) and lib. Both ways, for server and
// client. Threads: pure functions.
#ifndef LAYERD_WIRE_LAYER_CODEC_H_
#define LAYERD_WIRE_LAYER_CODEC_H_

#include "absl/status/statusor.h"
#include "layerd/v1/layer_registry.pb.h"
#include "lib/resident/layer_library.h"
#include "lib/resident/layer_store.h"

namespace layerd::wire {

void EncodeListing(const LayerListing& listing, v1::Layer& message);
// INVALID_ARGUMENT for a message that no server of ours sends.
absl::StatusOr<LayerListing> DecodeListing(const v1::Layer& message);

// INVALID_ARGUMENT with the path of the field, "header.feed_forward.layout" for example. What the store judges (name, size,
// hash) is left to it.
absl::StatusOr<UploadHeader> DecodeHeader(const v1::LayerHeader& message);
void EncodeHeader(const UploadHeader& header, v1::LayerHeader& message);

absl::StatusOr<LayerQuery> DecodeQuery(const v1::ListLayersRequest& request);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_LAYER_CODEC_H_
