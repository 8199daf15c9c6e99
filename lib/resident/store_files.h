// The files of a layer store, whatever they hold (lib/resident/layer_store.h has the layout and the promises).
//
// Everything is opened from descriptors of the store's folders, and no link in the store is followed: a record or a
// model's folder that is a link is not there.
//
// Errors: INTERNAL, reason STORE_IO, or RESOURCE_EXHAUSTED, reason DISK_FULL; field "layer_store".
#ifndef LAYERD_LIB_RESIDENT_STORE_FILES_H_
#define LAYERD_LIB_RESIDENT_STORE_FILES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/weights/layer_name.h"

namespace layerd {

// Longer records are not read to their end.
inline constexpr size_t kMaxRecordBytes = size_t{1} << 20;

// The error for a system call on `path`, relative to the store, that failed with `error`.
absl::Status StoreFault(std::string_view path, std::string_view what, int error);

// Owns a file descriptor, or none.
class Descriptor {
 public:
  explicit Descriptor(int descriptor = -1) : descriptor_(descriptor) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  bool is_open() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

// Tells one record file from all that had its name before or will have it.
struct RecordStamp {
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;
  bool operator==(const RecordStamp&) const = default;
};

struct RecordFile {
  RecordStamp stamp;
  std::string text;  // the first kMaxRecordBytes + 1 bytes at most
};

// A new file in uploads/, locked as long as this object lives, and removed with it unless it was made weights. Its space
// is set aside. Threads: one at a time.
class UploadFile {
 public:
  UploadFile(int folder, std::string name, Descriptor file);
  ~UploadFile();
  UploadFile(const UploadFile&) = delete;
  UploadFile& operator=(const UploadFile&) = delete;

  // Small pieces are gathered.
  absl::Status Append(absl::Span<const std::byte> bytes);
  // What was appended is on the disk when this returns OK.
  absl::Status Sync();

 private:
  friend class StoreFiles;

  absl::Status WriteOut(absl::Span<const std::byte> bytes);

  const int folder_;
  std::string name_;  // empty once the file is no upload any more
  const Descriptor file_;
  int64_t written_ = 0;
  std::vector<std::byte> gathered_;
};

// Threads: any.
class StoreFiles {
 public:
  // Makes the folders in `folder`, which must be one that can be written: FAILED_PRECONDITION otherwise.
  static absl::StatusOr<std::shared_ptr<StoreFiles>> Open(const std::string& folder);

  // While it lives, no other thread and no other process has one of the same store. A thread must not take a second.
  class Lock {
   public:
    Lock(Lock&& other) noexcept = default;
    Lock& operator=(Lock&&) = delete;
    ~Lock();

   private:
    friend class StoreFiles;
    Lock(std::unique_lock<std::mutex> mutex, int file) : mutex_(std::move(mutex)), file_(file) {}
    std::unique_lock<std::mutex> mutex_;
    int file_;
  };
  absl::StatusOr<Lock> Acquire();

  // Adds the names of all records, in no order; after an error, of those that could be seen. Other files and folders
  // are passed over.
  absl::Status ListRecords(std::vector<LayerName>& names) const;
  // Nothing where there is none.
  absl::StatusOr<std::optional<RecordStamp>> StampOf(const LayerName& name) const;
  absl::StatusOr<std::optional<RecordFile>> ReadRecord(const LayerName& name) const;
  // Not open where there are none.
  absl::StatusOr<Descriptor> OpenWeights(const std::string& sha256) const;
  // OK for a model that has a folder or none.
  absl::Status CheckModel(const std::string& model) const;

  // The sizes of all weights and uploads.
  absl::StatusOr<int64_t> UsedBytes(const Lock& lock) const;
  absl::StatusOr<std::unique_ptr<UploadFile>> CreateUpload(const Lock& lock, int64_t size_bytes);
  // Renames an upload that was synced into weights/, over what has that name, durably.
  absl::Status MakeWeights(const Lock& lock, UploadFile& upload, const std::string& sha256);
  // Writes a record, over what has that name, durably.
  absl::Status WriteRecord(const Lock& lock, const LayerName& name, std::string_view text);
  absl::Status RemoveRecord(const Lock& lock, const LayerName& name);

  // These remove what can be removed.
  // Uploads, and the record of a process that was killed: what nobody has locked.
  void RemoveDeadUploads(const Lock& lock);
  // Weights other than `named`; none where one of these is missing, since the record that names it may be damaged.
  void RemoveWeightsBut(const Lock& lock, const std::set<std::string>& named);
  // Folders of models that have no file.
  void RemoveEmptyModels(const Lock& lock);

 private:
  StoreFiles() = default;

  std::mutex mutex_;  // a lock of a file excludes other descriptors of it, not other threads with this one
  Descriptor lock_file_, layers_, weights_, uploads_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_STORE_FILES_H_
