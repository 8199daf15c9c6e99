// How far a quantised layer is from what it was made of, as JSON: in the records of the layer store and in files of one
// layer.
//
//   {"source_hash": "5f0c…", "matrices": [{"role": "up", "relative_rms_error": 0.0051, "max_abs_error": 0.0012}],
//    "output_relative_rms_error": 0.0074, "rows": 16, "seed": 1}
//
// Keys are the fields of proto/layerd/v1's Quantization; output_relative_rms_error may be missing, nothing else.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_WEIGHTS_QUANTIZATION_JSON_H_
#define LAYERD_LIB_WEIGHTS_QUANTIZATION_JSON_H_

#include "absl/status/statusor.h"
#include "lib/layers/quantization.h"
#include "nlohmann/json.hpp"

namespace layerd {

nlohmann::json QuantizationToJson(const Quantization& quantization);

// INVALID_ARGUMENT with the path of the field ("quantization.rows"), reason QUANTIZATION_JSON, for what has another form.
// Whether its values can be is left to CheckLayer().
absl::StatusOr<Quantization> QuantizationFromJson(const nlohmann::json& object);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_QUANTIZATION_JSON_H_
