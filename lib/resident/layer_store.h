// Layers that callers have uploaded, in a folder that several daemons may share.
//
//   layers/{model}/{layer}.json     one layer: its options, weights, hashes; names the file of its weights
//   weights/{sha256}.safetensors    weights, stored once however many layers have them
//   uploads/                        what is being written; each upload is locked by the process that writes it
//   lock                            locked for as long as layers are added, replaced or deleted
//
// A layer that was acknowledged is durable: its files are synced and renamed into place, and their folders synced. A
// process that is killed leaves the whole layer or nothing; what else it leaves is removed by the next Open(), of any
// process, and never while another one still writes it. Every change is seen by all processes at their next Find().
//
// No record is trusted. One that is damaged, or that a newer version wrote, is listed with FAILED_PRECONDITION, reason
// LAYER_DAMAGED, as its status; it has no etag, so it can only be deleted. As long as there is one, or one whose weights
// are missing, no weights are removed, for it may have named them. Weights that the disk has spoilt are mended by
// uploading the same layer again.
//
// Errors: those named below, with the field that is meant; INTERNAL and RESOURCE_EXHAUSTED (reason DISK_FULL) for faults
// of the file system, field "layer_store".
#ifndef LAYERD_LIB_RESIDENT_LAYER_STORE_H_
#define LAYERD_LIB_RESIDENT_LAYER_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/weights/layer_record.h"

namespace layerd {

struct LayerStoreOptions {
  int64_t max_bytes = int64_t{1} << 40;  // of all weights, uploads under way included
};

// What is said before the weights of an upload are sent: the fields of an error are "header.name" and so on.
struct UploadHeader {
  std::string name;        // models/{model}/layers/{layer}
  Layer layer;             // options; its weights are left out
  int64_t size_bytes = 0;  // of the safetensors bytes that follow
  std::string sha256;      // of those bytes, lower-case hexadecimal
  // The content hash of the layer that is to be replaced. Left out: there must be none of that name, or the same one.
  std::optional<std::string> etag;
};

// Threads: any.
class LayerStore : public LayerCatalog {
 public:
  // Opens the store in `folder`, and clears what killed processes left. FAILED_PRECONDITION for what is no folder that
  // can be written.
  static absl::StatusOr<std::unique_ptr<LayerStore>> Open(const std::string& folder, const LayerStoreOptions& options);
  ~LayerStore() override;

  // One upload. Dropped before Commit() has returned OK, it leaves nothing. Threads: one at a time.
  class Upload {
   public:
    virtual ~Upload() = default;
    // Takes the next bytes, of any number, of a safetensors file whose tensors are named by their roles. Errors as early
    // as they can be known, with field "chunk": more bytes than were announced; a header that is damaged, or whose
    // tensors do not fit the options (field "weights.…"). After an error every call gives it again.
    virtual absl::Status Write(absl::Span<const std::byte> bytes) = 0;
    // All bytes have been written: makes the layer durable and visible. INVALID_ARGUMENT for fewer bytes than announced,
    // or another SHA-256; ALREADY_EXISTS and ABORTED as in Begin(). Where the file system fails in the last step, the
    // layer may be there all the same.
    virtual absl::StatusOr<std::shared_ptr<const LayerRecord>> Commit() = 0;
  };

  // Begins an upload, after all checks that can be made before its bytes are there: INVALID_ARGUMENT for a name, a size,
  // a hash or options that cannot be; ALREADY_EXISTS, reason LAYER_EXISTS, for a name that is taken where no etag is
  // given (unless content and SHA-256 turn out to be the same); ABORTED, reason ETAG_MISMATCH, for an etag that is not
  // that of the layer there now; RESOURCE_EXHAUSTED, reason STORE_FULL, where the quota (--layer_store_mib) does not
  // suffice. Space for the bytes is set aside on the disk.
  absl::StatusOr<std::unique_ptr<Upload>> Begin(const UploadHeader& header);

  // Deletes a layer. NOT_FOUND where there is none; ABORTED where `etag` is given and is not its content hash. Whoever
  // has read its weights keeps them.
  absl::Status Delete(std::string_view name, const std::optional<std::string>& etag);

  // None of these waits for another process. A layer whose record cannot be read now is listed with that fault.
  absl::StatusOr<std::shared_ptr<const LayerRecord>> Find(std::string_view name) override;
  std::vector<std::shared_ptr<const LayerRecord>> List() override;
  std::string WarningOf(std::string_view model) override;

 private:
  struct Impl;
  explicit LayerStore(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // an upload has it too, and may outlive this object
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_STORE_H_
