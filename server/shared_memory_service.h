// The face of layerd.v1.SharedMemoryRegistry: decodes, delegates to the regions, encodes.
#ifndef LAYERD_SERVER_SHARED_MEMORY_SERVICE_H_
#define LAYERD_SERVER_SHARED_MEMORY_SERVICE_H_

#include "lib/base/shared_regions.h"
#include "lib/base/worker_pool.h"
#include "server/call_gate.h"
#include "server/call_loop.h"

namespace layerd {

// To map files, and to let go of them, takes a while where they are large: a thread of this service does it. What it is
// given must outlive it.
class SharedMemoryService {
 public:
  // `regions`: null where shared memory is off.
  SharedMemoryService(SharedRegions* regions, CallGate& gate);

  // Serves the methods of the service until the loop is stopped.
  void AddTo(CallLoop& loop);

 private:
  // Serves a method by `handle`, which makes an answer of the regions and a Request.
  template <typename Request, typename Handle>
  void Serve(CallLoop& loop, const char* method, Handle handle);

  SharedRegions* const regions_;
  CallGate& gate_;
  WorkerPool worker_;  // last: its jobs use the rest
};

}  // namespace layerd

#endif  // LAYERD_SERVER_SHARED_MEMORY_SERVICE_H_
