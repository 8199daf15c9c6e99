// The face of layerd.v1.LayerService: decodes, delegates to an engine, encodes. It computes nothing and decides nothing.
#ifndef LAYERD_SERVER_LAYER_SERVICE_H_
#define LAYERD_SERVER_LAYER_SERVICE_H_

#include <grpcpp/generic/async_generic_service.h>

#include <cstdint>

#include "layerd/v1/layer_service.grpc.pb.h"
#include "lib/base/shared_regions.h"
#include "lib/base/worker_pool.h"
#include "lib/engine/layer_engine.h"
#include "server/admission.h"
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
// The unary methods are left to LayerCallService: gRPC would receive their messages whole before anybody could refuse them.
//
// Threads: as gRPC calls it. Engine and admission must outlive it.
class LayerService final
    : public v1::LayerService::WithGenericMethod_Normalize<
          v1::LayerService::WithGenericMethod_FeedForward<v1::LayerService::WithRawCallbackMethod_StreamNormalize<
              v1::LayerService::WithRawCallbackMethod_StreamFeedForward<v1::LayerService::Service>>>> {
 public:
  LayerService(LayerEngine& engine, Admission& admission, const LayerServiceOptions& options)
      : engine_(engine), admission_(admission), options_(options) {}

  RowStreamReactor* StreamNormalize(grpc::CallbackServerContext* context) override;
  RowStreamReactor* StreamFeedForward(grpc::CallbackServerContext* context) override;

 private:
  LayerEngine& engine_;
  Admission& admission_;
  const LayerServiceOptions options_;
};

// LayerService's unary methods. gRPC brings all calls here whose method nobody else has: the others are UNIMPLEMENTED.
class LayerCallService final : public grpc::CallbackGenericService {
 public:
  // `regions`: memory that calls may refer to, which must outlive it too; null: none.
  LayerCallService(LayerEngine& engine, Admission& admission, const SharedRegions* regions,
                   const LayerServiceOptions& options);

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  LayerEngine& engine_;
  Admission& admission_;
  const SharedRegions* const regions_;
  const LayerServiceOptions options_;
  WorkerPool decoders_;  // last: its jobs use the rest
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LAYER_SERVICE_H_
