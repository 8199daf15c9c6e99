// The two streams of the service LayerRegistry: a layer's bytes on their way to a server, and back.
//
// Neither has a deadline: a stream ends in DEADLINE_EXCEEDED, without a reason (lib/base/errors.h), when none of its
// messages has passed for `patience`. Threads: any; each call waits on the caller's thread.
#ifndef LAYERD_CLIENT_LAYER_STREAM_H_
#define LAYERD_CLIENT_LAYER_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/remote_registry.h"
#include "layerd/v1/layer_registry.grpc.pb.h"

namespace layerd {

// CreateLayer: `header`, then `parts`, one after the other, in messages of `chunk_bytes`. An error that the server answers
// before it has all is returned at once.
absl::StatusOr<v1::Layer> SendLayer(v1::LayerRegistry::Stub& stub, const v1::LayerHeader& header,
                                    absl::Span<const absl::Span<const std::byte>> parts, int64_t chunk_bytes,
                                    const TransferProgress& progress, absl::Duration patience);

// DownloadLayer: gives every message to `sink`; an error of its own ends the stream and is returned.
absl::Status ReceiveLayer(v1::LayerRegistry::Stub& stub, const std::string& name,
                          absl::FunctionRef<absl::Status(const v1::DownloadLayerResponse&)> sink,
                          absl::Duration patience);

}  // namespace layerd

#endif  // LAYERD_CLIENT_LAYER_STREAM_H_
