// The face of layerd.v1.LayerService: decodes, delegates to an engine, encodes. It computes nothing and decides nothing
// but whether the server still takes calls.
#ifndef LAYERD_SERVER_LAYER_SERVICE_H_
#define LAYERD_SERVER_LAYER_SERVICE_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "absl/time/time.h"
#include "layerd/v1/layer_service.grpc.pb.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

// Threads: as gRPC calls it, and Drain() from any one. The engine must outlive it.
class LayerService final : public v1::LayerService::CallbackService {
 public:
  // A request of more than `max_message_bytes` is refused by name.
  LayerService(LayerEngine& engine, int64_t max_message_bytes)
      : engine_(engine), max_message_bytes_(max_message_bytes) {}

  grpc::ServerUnaryReactor* Normalize(grpc::CallbackServerContext* context, const v1::NormalizeRequest* request,
                                      v1::NormalizeResponse* response) override;
  grpc::ServerUnaryReactor* FeedForward(grpc::CallbackServerContext* context, const v1::FeedForwardRequest* request,
                                        v1::FeedForwardResponse* response) override;

  // From now on refuses calls with UNAVAILABLE; waits until those that were taken are finished, at most until
  // `deadline`. Returns how many are not.
  int64_t Drain(absl::Time deadline);

 private:
  template <typename Call, typename Result, typename Request, typename Response>
  grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, const Request* request, Response* response);

  // Counts a call in; false when draining.
  bool Enter();
  void Leave();

  LayerEngine& engine_;
  const int64_t max_message_bytes_;
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t in_flight_ = 0;  // guarded by mutex_
  bool draining_ = false;  // guarded by mutex_
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LAYER_SERVICE_H_
