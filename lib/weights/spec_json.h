// A layer's options as JSON: in the records of the layer store and in the descriptions of checkpoints.
//
//   {"normalize": {"kind": "layer_norm", "epsilon": 1e-06, "rounding": "after_gamma"}}
//   {"feed_forward": {"form": "plain", "activation": "gelu_tanh", "layout": "out_in"}}
//
// Keys are the fields of proto/layerd/v1's NormalizeSpec and FeedForwardSpec, names those of lib/weights/spec_names.h. What
// the messages require is required here too, an activation or a kind is never a default, and unknown keys are refused.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_WEIGHTS_SPEC_JSON_H_
#define LAYERD_LIB_WEIGHTS_SPEC_JSON_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "lib/layers/layer.h"
#include "nlohmann/json.hpp"

namespace layerd {

// Parses text of at most some MiB; INVALID_ARGUMENT, field "file", reason `reason`, saying where it is no JSON, nests
// deeper than 64 or has a key twice. `source` stands for the file in the text.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, std::string_view source, std::string_view reason);

// {"normalize": …} or {"feed_forward": …} with every option that is not the default.
nlohmann::json SpecToJson(const Layer& layer);

// The layer, without weights, that the one key "normalize" or "feed_forward" of `object` describes; other keys of `object`
// are the caller's. INVALID_ARGUMENT with the path of the field ("feed_forward.activation"), reason SPEC_JSON.
absl::StatusOr<Layer> SpecFromJson(const nlohmann::json& object);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_SPEC_JSON_H_
