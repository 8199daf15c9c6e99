// Layers that can be read, and whatever has them: checkpoints and the layer store.
#ifndef LAYERD_LIB_WEIGHTS_LAYER_RECORD_H_
#define LAYERD_LIB_WEIGHTS_LAYER_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "lib/base/parallel.h"
#include "lib/layers/layer.h"

namespace layerd {

// An option that was not written down as such, and where it was taken from: {"activation", "silu", "config.json
// hidden_act"}.
struct Inference {
  std::string option;
  std::string value;
  std::string source;
};

// What is known of a layer without reading its weights.
struct LayerInfo {
  std::string name;  // models/{model}/layers/{layer}
  bool uploaded = false;
  Layer outline;                               // options, and each weight's dtype and shape; where `status` is OK
  LayerExtent extent{};                        // where `status` is OK
  std::map<std::string, std::string> tensors;  // role → the tensor's name in its file
  std::vector<Inference> inferred;             // of a checkpoint's layer
  std::string content_hash;    // empty until it is known: always for uploads, from the first use for others
  std::string weights_sha256;  // of an uploaded layer's bytes, as they were sent
  absl::Time create_time = absl::InfinitePast();  // of an uploaded layer
  // Why the layer cannot be used: FAILED_PRECONDITION. It is listed all the same.
  absl::Status status;
};

// The weights of one version of a layer, open to be read, each from its beginning to its end. Errors are those of
// LayerRecord::Read(). Threads: Next() for different weights from several at once; otherwise one at a time.
class LayerReader {
 public:
  virtual ~LayerReader() = default;

  // Fills `out` with the next bytes of the weight `role`, which the record's outline has and which has so many left:
  // dense, row-major and little-endian.
  virtual absl::Status Next(std::string_view role, absl::Span<std::byte> out) = 0;

  // After the last byte of every weight: OK where all that was read is this version, undamaged. Before that, nothing that
  // was read may be relied on.
  virtual absl::Status Finish() = 0;
};

// One version of a layer. Threads: any.
class LayerRecord {
 public:
  virtual ~LayerRecord() = default;

  virtual const LayerInfo& info() const = 0;

  // Opens the weights, by a reader that does not outlive the record. NOT_FOUND where this version was deleted or replaced:
  // ask Find() again, which knows what is there now. Other errors as below. Throws std::bad_alloc.
  virtual absl::StatusOr<std::unique_ptr<LayerReader>> Open() const = 0;

  // Reads all weights into memory, as `info` describes them; never a mixture of two versions. info().status where that is
  // not OK; FAILED_PRECONDITION, reason LAYER_DAMAGED, where the files are not what they were, or cannot be read any more;
  // NOT_FOUND as above; RESOURCE_EXHAUSTED where memory cannot be had.
  absl::StatusOr<Layer> Read() const;
};

// Some rows of a weight (elements of a vector), as they lie in its file.
struct WeightPiece {
  std::string_view role;
  int64_t first_row;
  int64_t rows;
  absl::Span<const std::byte> bytes;
};

// The size that a piece has about. Where 64 rows are not more than a few times that, pieces begin at multiples of 64; a
// row that is longer than that is a piece of its own.
inline constexpr int64_t kPieceBytes = int64_t{1} << 20;

// Rows of each piece of a weight, the last of which may have fewer.
int64_t RowsOfPiece(const Tensor& outline);

// Reads all weights by pieces, never into more memory than a piece for each thread that reads. `take` gets the pieces of
// one weight one after the other, in order, and those of several weights at once, from threads of the arena; it must not
// throw. What it got is good only where the answer is OK. Errors are those of LayerRecord::Read().
absl::Status ReadPieces(const LayerRecord& record, const Arena& arena,
                        absl::FunctionRef<void(const WeightPiece& piece)> take);

// Threads: any.
class LayerCatalog {
 public:
  virtual ~LayerCatalog() = default;

  // The layer `name` as it is now; as long as it does not change, the same object. NOT_FOUND where there is none.
  virtual absl::StatusOr<std::shared_ptr<const LayerRecord>> Find(std::string_view name) = 0;

  // All layers as they are now, ordered by name.
  virtual std::vector<std::shared_ptr<const LayerRecord>> List() = 0;

  // What is wrong with the catalogue's own files beside single layers, for people: empty, or for example that a model's
  // new files cannot be used and the old ones still answer. `model` is the model's own name.
  virtual std::string WarningOf(std::string_view model) = 0;
};

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_LAYER_RECORD_H_
