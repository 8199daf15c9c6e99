// How far a quantised layer is from the layer it was made of, as whoever quantised it has measured. It goes with the layer,
// but is no part of what the layer computes, nor of its content hash.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_LAYERS_QUANTIZATION_H_
#define LAYERD_LIB_LAYERS_QUANTIZATION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace layerd {

// ŵ are the quantised weights, w those they were made of.
struct MatrixError {
  std::string role;               // of the int8 matrix, "gate"
  double relative_rms_error = 0;  // √(Σ(ŵ − w)² / Σw²); 0 where all are 0
  double max_abs_error = 0;       // max|ŵ − w|

  friend bool operator==(const MatrixError&, const MatrixError&) = default;
};

struct Quantization {
  std::string source_hash;  // content hash of the layer it was made of
  std::vector<MatrixError> matrices;
  // √(Σ(ŷ − y)² / Σy²) over the outputs for `rows` rows of SeededInput(seed, float32, …) (docs/seeded.md), both layers
  // computed in float32. Left out where it is no finite number.
  std::optional<double> output_relative_rms_error;
  int64_t rows = 0;
  int64_t seed = 0;

  friend bool operator==(const Quantization&, const Quantization&) = default;
};

// INVALID_ARGUMENT, field "quantization.…", for a hash that is no SHA-256, errors that are negative or not finite, and
// negative rows or seeds.
absl::Status CheckFigures(const Quantization& quantization);
// The same where it does not speak of the layer's int8 matrices, each once and in the order of their roles.
absl::Status CheckMatrices(const Quantization& quantization, absl::Span<const std::string_view> int8_matrices);

}  // namespace layerd

#endif  // LAYERD_LIB_LAYERS_QUANTIZATION_H_
