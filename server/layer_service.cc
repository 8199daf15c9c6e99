#include "server/layer_service.h"

#include <memory>
#include <utility>

#include "server/row_stream.h"
#include "server/unary_call.h"

namespace layerd {

LayerService::LayerService(LayerEngine& engine, Admission& admission, const SharedRegions* regions,
                           const LayerServiceOptions& options)
    : engine_(engine),
      admission_(admission),
      regions_(regions),
      options_(options),
      decoders_(options.decoding_threads, options.queue_calls, "--queue_calls") {}

void LayerService::AddTo(CallLoop& loop) {
  const UnaryCallContext context = {engine_, admission_, decoders_, regions_, options_.max_message_bytes};
  loop.Serve("/layerd.v1.LayerService/Normalize",
             [context](std::unique_ptr<CallArrival> arrival) { return NewNormalizeCall(context, std::move(arrival)); });
  loop.Serve("/layerd.v1.LayerService/FeedForward", [context](std::unique_ptr<CallArrival> arrival) {
    return NewFeedForwardCall(context, std::move(arrival));
  });
  loop.Serve("/layerd.v1.LayerService/StreamNormalize", [this](std::unique_ptr<CallArrival> arrival) {
    return NewNormalizeStream(engine_, admission_, options_.max_message_bytes, std::move(arrival));
  });
  loop.Serve("/layerd.v1.LayerService/StreamFeedForward", [this](std::unique_ptr<CallArrival> arrival) {
    return NewFeedForwardStream(engine_, admission_, options_.max_message_bytes, std::move(arrival));
  });
}

}  // namespace layerd
