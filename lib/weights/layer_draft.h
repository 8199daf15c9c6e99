// A layer of a checkpoint before its tensors are looked at: its options, where they are from, and its tensors' names.
#ifndef LAYERD_LIB_WEIGHTS_LAYER_DRAFT_H_
#define LAYERD_LIB_WEIGHTS_LAYER_DRAFT_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "lib/base/errors.h"
#include "lib/layers/layer.h"
#include "lib/weights/layer_record.h"

namespace layerd {

struct LayerDraft {
  Layer layer;                                 // options, without weights
  std::map<std::string, std::string> tensors;  // role → the tensor's name
  std::vector<Inference> inferred;
  // Why the layer cannot be used, as far as names and options tell.
  absl::Status status;
  // The entry of layerd.json that describes it ("layers[3]"); empty where none does.
  std::string entry;
};

// By the layer's own name.
using LayerDrafts = std::map<std::string, LayerDraft>;

// Why a layer cannot be used: FAILED_PRECONDITION. Reasons: LAYER_DAMAGED, LAYER_DTYPE, LAYER_INCOMPLETE,
// LAYER_AMBIGUOUS, LAYER_OPTIONS_OPEN.
inline absl::Status UnusableLayer(std::string_view reason, std::string_view text) {
  ErrorDetails details;
  details.reason = std::string(reason);
  return WithDetails(absl::StatusCode::kFailedPrecondition, text, details);
}

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_LAYER_DRAFT_H_
