// The two kinds of calls that the layer service has, for what handles both alike.
#ifndef LAYERD_SERVER_LAYER_CALL_H_
#define LAYERD_SERVER_LAYER_CALL_H_

#include <utility>

#include "layerd/v1/layer_service.pb.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

struct NormalizeKind {
  using Request = v1::NormalizeRequest;
  using StreamRequest = v1::StreamNormalizeRequest;
  using Response = v1::NormalizeResponse;
  using Call = NormalizeCall;
  using Result = NormalizeResult;
  static void Ask(LayerEngine& engine, NormalizeCall call, NormalizeDone done) {
    engine.Normalize(std::move(call), std::move(done));
  }
};

struct FeedForwardKind {
  using Request = v1::FeedForwardRequest;
  using StreamRequest = v1::StreamFeedForwardRequest;
  using Response = v1::FeedForwardResponse;
  using Call = FeedForwardCall;
  using Result = FeedForwardResult;
  static void Ask(LayerEngine& engine, FeedForwardCall call, FeedForwardDone done) {
    engine.FeedForward(std::move(call), std::move(done));
  }
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LAYER_CALL_H_
