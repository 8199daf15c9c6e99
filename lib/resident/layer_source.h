// Where an engine gets the layers that calls name: prepared, that is read and in memory.
#ifndef LAYERD_LIB_RESIDENT_LAYER_SOURCE_H_
#define LAYERD_LIB_RESIDENT_LAYER_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/layers/layer.h"
#include "lib/layers/packed_feed_forward.h"

namespace layerd {

struct PreparedLayer {
  std::string name;
  Layer layer;                                      // a norm; of a feed-forward layer the outline
  std::shared_ptr<const PackedFeedForward> packed;  // the weights of a feed-forward layer
  LayerExtent extent{};
  int64_t memory_bytes = 0;  // that it takes
  std::string content_hash;
};

using PreparedLayerDone = absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<const PreparedLayer>>)>;

// Threads: any.
class LayerSource {
 public:
  virtual ~LayerSource() = default;

  // Gives `done` the layer `name` as it is now, exactly once: on this thread where it is prepared or cannot be had, else
  // on a thread of the source; `done` must not block for long. Errors: NOT_FOUND and FAILED_PRECONDITION, field "layer",
  // the latter with reason LAYER_DAMAGED or what LayerInfo::status says; RESOURCE_EXHAUSTED, for good where the layer is
  // larger than the budget (--layer_memory_mib), with a delay where all memory is in use or too many calls wait;
  // DEADLINE_EXCEEDED where `deadline` has passed: a preparation is not begun for such callers alone; UNAVAILABLE at the
  // source's end.
  virtual void Acquire(std::string_view name, absl::Time deadline, PreparedLayerDone done) = 0;
};

// The same, waiting for the answer.
absl::StatusOr<std::shared_ptr<const PreparedLayer>> Acquire(LayerSource& source, std::string_view name,
                                                             absl::Time deadline = absl::InfiniteFuture());

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_SOURCE_H_
