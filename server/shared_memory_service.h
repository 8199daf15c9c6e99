// The face of layerd.v1.SharedMemoryRegistry: decodes, delegates to the regions, encodes.
#ifndef LAYERD_SERVER_SHARED_MEMORY_SERVICE_H_
#define LAYERD_SERVER_SHARED_MEMORY_SERVICE_H_

#include "layerd/v1/shared_memory.grpc.pb.h"
#include "lib/base/shared_regions.h"
#include "lib/base/worker_pool.h"
#include "server/call_gate.h"

namespace layerd {

// To map files, and to let go of them, takes a while where they are large: a thread of this service does it. Messages are taken as
// bytes, as in LayerService.
//
// Threads: as gRPC calls it. Regions and gate must outlive it.
class SharedMemoryService final
    : public v1::SharedMemoryRegistry::WithRawCallbackMethod_RegisterRegion<
          v1::SharedMemoryRegistry::WithRawCallbackMethod_UnregisterRegion<
              v1::SharedMemoryRegistry::WithRawCallbackMethod_ListRegions<v1::SharedMemoryRegistry::Service>>> {
 public:
  // `regions`: null where shared memory is off.
  SharedMemoryService(SharedRegions* regions, CallGate& gate);

  grpc::ServerUnaryReactor* RegisterRegion(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UnregisterRegion(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListRegions(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;

 private:
  // Answers a call by `handle`, which makes a response of a Request and the regions.
  template <typename Request, typename Handle>
  grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response, Handle handle);

  SharedRegions* const regions_;
  CallGate& gate_;
  WorkerPool worker_;  // last: its jobs use the rest
};

}  // namespace layerd

#endif  // LAYERD_SERVER_SHARED_MEMORY_SERVICE_H_
