// Reads the safetensors bytes of an upload as they come, checks them as early as can be, and hashes them on the way.
#ifndef LAYERD_LIB_RESIDENT_UPLOAD_READER_H_
#define LAYERD_LIB_RESIDENT_UPLOAD_READER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/layers/layer.h"
#include "lib/resident/store_record.h"
#include "lib/weights/layer_hash.h"

namespace layerd {

// More bytes are no layer: three matrices of kMaxElements float32, and what is small beside them.
inline constexpr int64_t kMaxUploadBytes = int64_t{1} << 42;
// The length of the header, and "{}".
inline constexpr int64_t kMinUploadBytes = 10;

// The layer's options alone.
Layer OptionsOf(const Layer& layer);

// Whether any weights could fit the options. INVALID_ARGUMENT, field "header.normalize.…" or "header.feed_forward.…".
absl::Status CheckOptions(const Layer& options);

// Threads: one at a time.
class UploadReader {
 public:
  // `options` have passed CheckOptions(), and `size_bytes` lies within the limits above.
  UploadReader(Layer options, int64_t size_bytes);

  // Takes the next bytes, of any number. The header is checked with its last byte, its length with the eighth.
  // INVALID_ARGUMENT, field "chunk", for more bytes than were announced and for what is no safetensors file; field
  // "weights.…" for tensors that do not fit the options. After an error nothing more may be asked of this object.
  absl::Status Take(absl::Span<const std::byte> bytes);

  // After the last byte: the layer, complete but for its name and time. INVALID_ARGUMENT, field "chunk", for fewer bytes
  // than announced.
  absl::StatusOr<StoredLayer> Finish();

 private:
  absl::Status CheckLength();
  absl::Status CheckHeader();
  void HashTensors(absl::Span<const std::byte> bytes);

  StoredLayer layer_;  // its tensors in the order of their bytes
  Sha256 hash_;
  int64_t taken_ = 0;
  std::string head_;        // the bytes before the data, until they are checked
  int64_t head_bytes_ = 8;  // what is known of their number
  bool in_data_ = false;
  size_t tensor_ = 0;  // the one whose bytes come now
  Sha256 tensor_hash_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_UPLOAD_READER_H_
