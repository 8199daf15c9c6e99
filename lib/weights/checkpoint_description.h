// layerd.json: a description of a checkpoint's layers, for what no family knows.
//
//   {"layers": [
//     {"layer": "layers.{i}.ln1",
//      "normalize": {"kind": "layer_norm", "epsilon": 1e-06, "rounding": "after_gamma"},
//      "weights": {"gamma": "layers.{i}.ln1.weight", "beta": "layers.{i}.ln1.bias"}},
//     {"layer": "layers.{i}.ffn",
//      "feed_forward": {"form": "plain", "activation": "gelu_tanh", "layout": "out_in"},
//      "weights": {"up": "layers.{i}.fc1.weight", "up_bias": "layers.{i}.fc1.bias",
//                  "down": "layers.{i}.fc2.weight", "down_bias": "layers.{i}.fc2.bias"}}]}
//
// Options are those of lib/weights/spec_json.h, weights those of lib/layers/layer.h by role. {i} stands for a decimal
// number: the entry describes one layer for each number for which its first weight exists, that is gamma, gate, gate_up, or
// the plain form's up. Either all names of an entry have {i}, each once, or none has.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_WEIGHTS_CHECKPOINT_DESCRIPTION_H_
#define LAYERD_LIB_WEIGHTS_CHECKPOINT_DESCRIPTION_H_

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/weights/checkpoint_folder.h"
#include "lib/weights/layer_draft.h"
#include "lib/weights/tensor_files.h"

namespace layerd {

// The layers that the folder's layerd.json describes; none where it has no such file. INVALID_ARGUMENT, field "file",
// reason CHECKPOINT_DESCRIPTION, with the path of what is wrong ("layers[0].normalize.kind"): unknown keys, what is
// missing, two entries for one layer, names that no layer can have, and an entry that matches nothing, unless
// `may_match_nothing`.
absl::StatusOr<LayerDrafts> DescribedLayers(const CheckpointFolder& folder, const TensorMap& tensors,
                                            bool may_match_nothing);

// That error.
absl::Status WrongDescription(std::string_view text);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_CHECKPOINT_DESCRIPTION_H_
