// Layers of a checkpoint, found by the names that its tensors have.
//
// The names decide form, packing and orientation (`.weight` of each, with an optional `.bias`):
//
//   gate_proj, up_proj, down_proj      gated, [out, in]             Llama, Mistral, Qwen, Gemma, experts of DeepSeek
//   w1, w3, w2                         gated, [out, in]             experts of Mixtral
//   gate_up_proj, down_proj            gated, halves, [out, in]     Phi-3, GLM-4
//   c_fc, c_proj                       plain, [in, out]             GPT-2
//   dense_h_to_4h, dense_4h_to_h       plain, [out, in]             GPT-NeoX, Falcon
//   fc1, fc2                           plain, [out, in]             OPT, KWT
//   intermediate.dense, output.dense   plain, [out, in]             BERT
//
// ffn_sub_norm.weight beside them is an inner norm (BitNet). Names do not tell the activation or an epsilon: those come
// from `config.json` in the file's folder, and stay open where there is none. What neither tells (limits, offsets on γ,
// rounding) is the caller's to say. Shapes are checked against each other before any data is read.
//
// Errors, with the field "file": NOT_FOUND, reason NO_SUCH_LAYER, where no tensor of a layer has the prefix (the text
// names some prefixes that exist); INVALID_ARGUMENT for a layer that is incomplete, ambiguous or does not fit together,
// naming the tensor, and for a config.json that is damaged or names an activation that layerd does not have; those of
// SafetensorsFile::Read.
//
// Threads: pure functions of the files; from any number of threads.
#ifndef LAYERD_LIB_WEIGHTS_CHECKPOINT_H_
#define LAYERD_LIB_WEIGHTS_CHECKPOINT_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"
#include "lib/weights/safetensors.h"

namespace layerd {

struct CheckpointFeedForward {
  FeedForwardSpec spec;
  FeedForwardWeights weights;
  std::string description;        // for people: "gated: gate_proj, up_proj, down_proj [out, in]; silu; d 64, h 172"
  bool activation_known = false;  // config.json gave spec.activation; the caller must choose one otherwise
};

// The feed-forward layer at `prefix` ("model.layers.0.mlp", with or without a dot at its end; empty where the names
// begin at once).
absl::StatusOr<CheckpointFeedForward> ReadFeedForward(const SafetensorsFile& file, std::string_view prefix);

struct CheckpointNorm {
  Tensor gamma;                  // [d]
  std::optional<Tensor> beta;    // [d]
  std::optional<NormKind> kind;  // LayerNorm where there is a β, else the one whose eps config.json has; may stay open
  std::optional<double> epsilon;  // config.json's for that kind; may stay open
  std::string description;        // for people: "RMSNorm; eps 1e-05; d 64"
};

// The norm at `prefix` ("model.norm"): γ is `.weight` or, in old files, `.gamma`; β is `.bias` or `.beta`.
absl::StatusOr<CheckpointNorm> ReadNorm(const SafetensorsFile& file, std::string_view prefix);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_CHECKPOINT_H_
