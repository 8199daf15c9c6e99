// The face of layerd.v1.LayerRegistry: decodes, delegates to the registry, encodes.
//
// Every method waits for files, so all of them run on threads of this service; messages are taken as bytes, as in
// LayerService. An upload's chunks are read one at a time: the next when the one before is written, so that a caller who
// sends faster than the disk takes is slowed down, and memory stays flat.
#ifndef LAYERD_SERVER_LAYER_REGISTRY_SERVICE_H_
#define LAYERD_SERVER_LAYER_REGISTRY_SERVICE_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <thread>

#include "absl/time/time.h"
#include "layerd/v1/layer_registry.grpc.pb.h"
#include "lib/base/worker_pool.h"
#include "lib/resident/layer_registry.h"
#include "server/call_gate.h"

namespace layerd {

struct LayerRegistryServiceOptions {
  int64_t max_message_bytes = int64_t{64} << 20;  // a larger message, or a larger chunk, is refused by name
  int threads = 2;
  int queue_calls = 256;  // messages that may wait for a thread
  // An upload that sends nothing for so long is ended: it holds space in the store.
  absl::Duration upload_idle = absl::Seconds(60);
};

// Threads: as gRPC calls it. Registry and gate must outlive it.
class LayerRegistryService final
    : public v1::LayerRegistry::WithRawCallbackMethod_CreateLayer<v1::LayerRegistry::WithRawCallbackMethod_GetLayer<
          v1::LayerRegistry::WithRawCallbackMethod_ListLayers<v1::LayerRegistry::WithRawCallbackMethod_DeleteLayer<
              v1::LayerRegistry::WithRawCallbackMethod_DownloadLayer<v1::LayerRegistry::Service>>>>> {
 public:
  LayerRegistryService(LayerRegistry& registry, CallGate& gate, const LayerRegistryServiceOptions& options);
  ~LayerRegistryService() override;

  grpc::ServerReadReactor<grpc::ByteBuffer>* CreateLayer(grpc::CallbackServerContext* context,
                                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetLayer(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListLayers(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* DeleteLayer(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* DownloadLayer(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request) override;

 private:
  class Upload;
  class Download;

  // Answers a unary call by `handle`, which makes a Response of a Request.
  template <typename Request, typename Handle>
  grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response, Handle handle);

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
