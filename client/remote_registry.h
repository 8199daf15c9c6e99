// The layers that live on a layerd: lists, uploads, downloads and deletes them over gRPC (service LayerRegistry).
#ifndef LAYERD_CLIENT_REMOTE_REGISTRY_H_
#define LAYERD_CLIENT_REMOTE_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/layers/layer.h"
#include "lib/resident/layer_library.h"

namespace layerd {

struct RemoteRegistryOptions {
  std::string target = "127.0.0.1:50051";  // HOST:PORT, or unix:PATH
  // How long a call may take. An upload or a download may take any time, but not so long without progress.
  absl::Duration timeout = absl::Seconds(60);
};

// Told before the first byte, and after every message, how many of how many bytes have passed; on the caller's thread.
using TransferProgress = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

struct UploadOptions {
  // The etag of the layer that is to be replaced. Left out: there must be none of that name, or the same one.
  std::optional<std::string> etag;
  int64_t chunk_bytes = int64_t{1} << 20;  // of a message; at least 1
  TransferProgress progress;               // may be null
};

struct DownloadedLayer {
  Layer layer;
  std::string content_hash;
};

// Errors of the server come back as it made them, with details; UNAVAILABLE and DEADLINE_EXCEEDED without a reason
// (lib/base/errors.h) mean that it could not be reached, or did not answer in time; INTERNAL, reason MALFORMED_ANSWER
// (client/remote_engine.h), that it answered what no layerd does. The connection is made by the first call, and again
// after it broke; no proxy is used.
//
// Threads: any.
class RemoteRegistry {
 public:
  explicit RemoteRegistry(const RemoteRegistryOptions& options);
  ~RemoteRegistry();

  // The listing's outline and extent are there where its info.status is OK.
  absl::StatusOr<LayerListing> Get(const std::string& name);

  // One page; all pages. A query's model may be "-", for all.
  absl::StatusOr<LayerPage> List(const LayerQuery& query);
  absl::StatusOr<std::vector<LayerListing>> ListAll(LayerQuery query);

  absl::Status Delete(const std::string& name, const std::optional<std::string>& etag = std::nullopt);

  // Uploads `layer`, which must be no outline. When the server refuses while bytes are still being sent, its error is
  // returned at once. Whatever comes back, the layer is there as a whole or not at all.
  absl::StatusOr<LayerListing> Upload(const std::string& name, const Layer& layer, const UploadOptions& options = {});

  // Downloads a layer into memory. Its content hash is computed from what came, and is the one that the server told.
  // RESOURCE_EXHAUSTED where memory for it cannot be had.
  absl::StatusOr<DownloadedLayer> Download(const std::string& name, const TransferProgress& progress = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace layerd

#endif  // LAYERD_CLIENT_REMOTE_REGISTRY_H_
