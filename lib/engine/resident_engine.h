// The engine for calls that name their layer: finds it, and gives the call to another engine with the weights in it.
#ifndef LAYERD_LIB_ENGINE_RESIDENT_ENGINE_H_
#define LAYERD_LIB_ENGINE_RESIDENT_ENGINE_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "lib/engine/layer_engine.h"
#include "lib/resident/layer_source.h"

namespace layerd {

// A call without a name goes through as it is. For one with a name: INVALID_ARGUMENT, reason TWO_SOURCES, where weights
// come with it too; reason WRONG_KIND, field "layer", for a norm by FeedForward and the reverse; reason
// CONTRADICTS_LAYER, field "spec.…", for an option that is not the layer's, defaults filled in; reason SHAPE_MISMATCH,
// field "input.shape", for an input that is not as wide as the layer; the errors of LayerSource::Acquire. The result
// tells the layer's content hash. A call that has expired or was cancelled is not begun.
//
// Threads: any; `done` may be called on a thread of `layers` or of `inner`. Both must outlive it. The destructor waits
// until every call has been passed on or answered.
class ResidentEngine : public LayerEngine {
 public:
  ResidentEngine(LayerSource& layers, LayerEngine& inner) : layers_(layers), inner_(inner) {}
  ~ResidentEngine() override;

  void Normalize(NormalizeCall call, NormalizeDone done) override;
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override;
  absl::Status CheckAdmission(const CallContext& context) override { return inner_.CheckAdmission(context); }

 private:
  template <typename OneLayer, typename Result, typename Call, typename Done, typename Pass>
  void Submit(Call call, Done done, Pass pass);

  LayerSource& layers_;
  LayerEngine& inner_;
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t resolving_ = 0;  // guarded by mutex_; calls that are not passed on yet
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_RESIDENT_ENGINE_H_
