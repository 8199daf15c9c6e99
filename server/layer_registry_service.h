// The face of layerd.v1.LayerRegistry: decodes, delegates to the registry, encodes.
//
// Every method waits for files, so all of them run on threads of this service; messages are taken as bytes, as in
// LayerService. An upload's chunks are read one at a time: the next when the one before is written, so that a caller who
// sends faster than the disk takes is slowed down, and memory stays flat.
#ifndef LAYERD_SERVER_LAYER_REGISTRY_SERVICE_H_
#define LAYERD_SERVER_LAYER_REGISTRY_SERVICE_H_

#include <google/protobuf/empty.pb.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "layerd/v1/layer_registry.grpc.pb.h"
#include "lib/base/worker_pool.h"
#include "lib/resident/layer_registry.h"
#include "server/call_gate.h"
#include "server/call_loop.h"

namespace layerd {

struct LayerRegistryServiceOptions {
  int64_t max_message_bytes = int64_t{64} << 20;  // a larger message, or a larger chunk, is refused by name
  int threads = 2;
  int queue_calls = 256;  // messages that may wait for a thread
  // An upload that sends nothing for so long is ended: it holds space in the store.
  absl::Duration upload_idle = absl::Seconds(60);
};

// What it is given must outlive it.
class LayerRegistryService {
 public:
  LayerRegistryService(LayerRegistry& registry, CallGate& gate, const LayerRegistryServiceOptions& options);
  ~LayerRegistryService();

  // Serves the methods of the service until the loop is stopped.
  void AddTo(CallLoop& loop);

 private:
  class Upload;
  class Download;

  // Serves a method by `handle`, which makes an answer of a Request.
  template <typename Request, typename Handle>
  void Serve(CallLoop& loop, const char* method, Handle handle);

  absl::StatusOr<v1::Layer> GetLayer(const v1::GetLayerRequest& message);
  absl::StatusOr<v1::ListLayersResponse> ListLayers(const v1::ListLayersRequest& message);
  absl::StatusOr<google::protobuf::Empty> DeleteLayer(const v1::DeleteLayerRequest& message);

  // Ends uploads that are idle, until the service stops.
  void WatchUploads();

  LayerRegistry& registry_;
  CallGate& gate_;
  const LayerRegistryServiceOptions options_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;       // guarded by mutex_
  std::set<Upload*> uploads_;   // guarded by mutex_; those under way
  WorkerPool workers_;          // its jobs use the rest
  std::thread upload_watcher_;  // last, likewise
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LAYER_REGISTRY_SERVICE_H_
