// Which layers a checkpoint has, and their options, by its tensors' names, its family and its config.json.
//
// A layer at one of its family's paths (lib/weights/families.h) has the family's options. Every other layer is known by
// its tensors' names alone, and by config.json where that describes one model of no known family; what they leave open
// makes the layer unusable, unless the caller's hints tell it. A layer whose name cannot be a layer's name is left out.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_WEIGHTS_LAYER_INFERENCE_H_
#define LAYERD_LIB_WEIGHTS_LAYER_INFERENCE_H_

#include "lib/weights/checkpoint.h"
#include "lib/weights/layer_draft.h"
#include "lib/weights/model_config.h"
#include "lib/weights/tensor_files.h"

namespace layerd {

LayerDrafts InferLayers(const TensorMap& tensors, const ModelConfig& config, const CheckpointHints& hints);

// Puts what the caller knows better in place of the options of a layer that layerd.json describes.
void ApplyHints(const CheckpointHints& hints, LayerDraft& draft);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_LAYER_INFERENCE_H_
