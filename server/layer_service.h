// The face of layerd.v1.LayerService: decodes, delegates to an engine, encodes. It computes nothing and decides nothing
// but whether the server still takes calls.
#ifndef LAYERD_SERVER_LAYER_SERVICE_H_
#define LAYERD_SERVER_LAYER_SERVICE_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "absl/time/time.h"
#include "layerd/v1/layer_service.grpc.pb.h"
#include "lib/base/worker_pool.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

struct LayerServiceOptions {
  int64_t max_message_bytes = int64_t{64} << 20;   // a larger request is refused by name
  int64_t max_bytes_in_flight = int64_t{1} << 30;  // of requests; beyond it calls are refused, unless there is no other
  int decoding_threads = 1;
  int queue_calls = 256;  // large requests that may wait to be decoded
};

// Requests are taken as bytes (see wire/message_codec.h). Small ones are decoded on gRPC's thread, larger ones on a thread
// of this service, so that gRPC's go on serving others.
//
// Threads: as gRPC calls it, and Drain() from any one. The engine must outlive it.
class LayerService final : public v1::LayerService::WithRawCallbackMethod_Normalize<
                               v1::LayerService::WithRawCallbackMethod_FeedForward<v1::LayerService::Service>> {
 public:
  LayerService(LayerEngine& engine, const LayerServiceOptions& options);

  grpc::ServerUnaryReactor* Normalize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* FeedForward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;

  // From now on refuses calls with UNAVAILABLE; waits until those that were taken are finished, at most until
  // `deadline`. Returns how many are not.
  int64_t Drain(absl::Time deadline);

 private:
  template <typename Request, typename Response, typename Result>
  grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response);

  // Counts in a call whose message has so many bytes, or says why not.
  absl::Status Enter(int64_t bytes);
  void Leave(int64_t bytes);

  LayerEngine& engine_;
  const LayerServiceOptions options_;
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t in_flight_ = 0;        // guarded by mutex_
  int64_t bytes_in_flight_ = 0;  // guarded by mutex_
  bool draining_ = false;        // guarded by mutex_
  WorkerPool decoders_;          // last: its jobs use the rest
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LAYER_SERVICE_H_
