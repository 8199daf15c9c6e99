// The face of layerd.v1.LayerService: decodes, delegates to an engine, encodes. It computes nothing and decides nothing.
#ifndef LAYERD_SERVER_LAYER_SERVICE_H_
#define LAYERD_SERVER_LAYER_SERVICE_H_

#include <cstdint>

#include "layerd/v1/layer_service.grpc.pb.h"
#include "lib/base/shared_regions.h"
#include "lib/base/worker_pool.h"
#include "lib/engine/layer_engine.h"
#include "server/call_gate.h"
#include "server/row_stream.h"

namespace layerd {

struct LayerServiceOptions {
  int64_t max_message_bytes = int64_t{64} << 20;  // a larger request is refused by name
  int decoding_threads = 1;
  int queue_calls = 256;  // large requests that may wait to be decoded
};

// Requests are taken as bytes (see wire/message_codec.h), and decoded on gRPC's thread. Where that takes long, as for gzip,
// it is done on a thread of this service, so that gRPC's go on serving others.
//
// Threads: as gRPC calls it. Engine and gate must outlive it.
class LayerService final
    : public v1::LayerService::WithRawCallbackMethod_Normalize<
          v1::LayerService::WithRawCallbackMethod_FeedForward<v1::LayerService::WithRawCallbackMethod_StreamNormalize<
              v1::LayerService::WithRawCallbackMethod_StreamFeedForward<v1::LayerService::Service>>>> {
 public:
  // `regions`: memory that calls may refer to, which must outlive it too; null: none.
  LayerService(LayerEngine& engine, CallGate& gate, const SharedRegions* regions, const LayerServiceOptions& options);

  grpc::ServerUnaryReactor* Normalize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* FeedForward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  RowStreamReactor* StreamNormalize(grpc::CallbackServerContext* context) override;
  RowStreamReactor* StreamFeedForward(grpc::CallbackServerContext* context) override;

 private:
  template <typename Request, typename Response, typename Result>
  grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response);

  LayerEngine& engine_;
  CallGate& gate_;
  const SharedRegions* const regions_;
  const LayerServiceOptions options_;
  WorkerPool decoders_;  // last: its jobs use the rest
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LAYER_SERVICE_H_
