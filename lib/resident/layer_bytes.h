// The bytes of a prepared layer as a safetensors file whose tensors are named by their roles, a piece at a time: what a
// download sends, whatever form the layer has in memory.
#ifndef LAYERD_LIB_RESIDENT_LAYER_BYTES_H_
#define LAYERD_LIB_RESIDENT_LAYER_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/base/tensor.h"
#include "lib/resident/layer_source.h"

namespace layerd {

// Keeps the layer in memory. Threads: one at a time.
class LayerBytes {
 public:
  // Errors: those of SafetensorsHead().
  static absl::StatusOr<LayerBytes> Of(std::shared_ptr<const PreparedLayer> layer);

  int64_t size_bytes() const { return size_bytes_; }

  // The next bytes, at most `max_bytes` (at least 1), none at the end; valid until the next call. Takes memory for so many
  // bytes, or for one row of a weight where that is longer. Throws std::bad_alloc.
  absl::Span<const std::byte> Next(size_t max_bytes);

 private:
  LayerBytes(std::shared_ptr<const PreparedLayer> layer, std::string head);

  absl::Span<const std::byte> NextPiece(size_t max_bytes);

  std::shared_ptr<const PreparedLayer> layer_;
  std::string head_;
  std::vector<std::pair<std::string_view, Tensor>> weights_;
  int64_t size_bytes_;
  // What comes behind `rest_`: this row of this weight.
  size_t weight_ = 0;
  int64_t row_ = 0;
  bool begun_ = false;
  std::vector<std::byte> piece_;
  absl::Span<const std::byte> rest_;  // what is left of the head or of a piece
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_BYTES_H_
