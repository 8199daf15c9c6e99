// The face of layerd.v1.LayerService: decodes, delegates to an engine, encodes. It computes nothing and decides nothing.
#ifndef LAYERD_SERVER_LAYER_SERVICE_H_
#define LAYERD_SERVER_LAYER_SERVICE_H_

#include <cstdint>

#include "lib/base/shared_regions.h"
#include "lib/base/worker_pool.h"
#include "lib/engine/layer_engine.h"
#include "server/admission.h"
#include "server/call_loop.h"

namespace layerd {

struct LayerServiceOptions {
  int64_t max_message_bytes = int64_t{64} << 20;  // a larger request is refused by name
  int decoding_threads = 1;
  int queue_calls = 256;  // large requests that may wait to be decoded
};

// Requests are taken as bytes (see wire/message_codec.h), and decoded on the loop's thread. Where that takes long, as for
// gzip, it is done on a thread of this service. What it is given must outlive it.
class LayerService {
 public:
  // `regions`: memory that calls may refer to; null: none.
  LayerService(LayerEngine& engine, Admission& admission, const SharedRegions* regions,
               const LayerServiceOptions& options);

  // Serves the methods of the service until the loop is stopped.
  void AddTo(CallLoop& loop);

 private:
  LayerEngine& engine_;
  Admission& admission_;
  const SharedRegions* const regions_;
  const LayerServiceOptions options_;
  WorkerPool decoders_;  // last: its jobs use the rest
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LAYER_SERVICE_H_
