// Memory that callers on this host share with the daemon: files in one folder that the operator names, mapped once and
// registered under names.
//
// A file belongs to its caller, who may write to it or truncate it at any time, while a call is computed too. Neither does
// harm: values are only values, and lib/base/guarded_mapping.h survives the rest. What a call has read of a region that is not
// intact when it ends is worth nothing.
#ifndef LAYERD_LIB_BASE_SHARED_REGIONS_H_
#define LAYERD_LIB_BASE_SHARED_REGIONS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/base/guarded_mapping.h"

namespace layerd {

// A mapped file. Threads: any.
class SharedRegion {
 public:
  // Tensors in a region begin at a multiple of so many bytes.
  static constexpr int64_t kAlignment = 64;

  // Maps all of the regular file `file`, which may have no holes, in the folder that `folder` is open for; the path is one
  // name, never a link.
  // INVALID_ARGUMENT, NOT_FOUND or FAILED_PRECONDITION, field "file", where it cannot be; those of GuardedMapping::Map().
  static absl::StatusOr<std::shared_ptr<const SharedRegion>> Open(int folder, const std::string& file);
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;
  ~SharedRegion();

  std::byte* data() const { return mapping_->data(); }
  int64_t size_bytes() const { return static_cast<int64_t>(mapping_->size()); }
  const std::string& file() const { return file_; }
  bool IsSameFile(const SharedRegion& other) const { return device_ == other.device_ && inode_ == other.inode_; }

  // FAILED_PRECONDITION, reason REGION_TRUNCATED, where the file is shorter than it was; REGION_DAMAGED where a page was
  // missing when it was touched, which nothing mends but to map the file again.
  absl::Status CheckIntact() const;

 private:
  SharedRegion(std::string file, int fd, dev_t device, ino_t inode, std::unique_ptr<GuardedMapping> mapping);

  const std::string file_;
  const int fd_;
  const dev_t device_;
  const ino_t inode_;
  const std::unique_ptr<GuardedMapping> mapping_;
};

// Regions by name. Threads: any.
class SharedRegions {
 public:
  static constexpr size_t kMostRegions = 1024;
  static constexpr size_t kMostNameBytes = 128;

  struct Entry {
    std::string name;
    std::shared_ptr<const SharedRegion> region;
  };

  // Of files in `folder`. FAILED_PRECONDITION where that cannot be opened.
  static absl::StatusOr<std::unique_ptr<SharedRegions>> Open(const std::string& folder);
  SharedRegions(const SharedRegions&) = delete;
  SharedRegions& operator=(const SharedRegions&) = delete;
  ~SharedRegions();

  // Maps `file` and gives it `name`: letters, digits, '.', '_' and '-'. The same once more changes nothing, but that a file
  // which was damaged or has another size is mapped anew; calls under way keep what they have. INVALID_ARGUMENT for a name
  // that can be none; ALREADY_EXISTS where the name has another file, or the file another name; RESOURCE_EXHAUSTED for more
  // than kMostRegions; errors of SharedRegion::Open(). Fields are "name" and "file".
  absl::StatusOr<Entry> Register(const std::string& name, const std::string& file);
  // Calls under way keep the region. NOT_FOUND, field "name".
  absl::Status Unregister(const std::string& name);
  // Intact as far as is known. NOT_FOUND, field "region"; FAILED_PRECONDITION.
  absl::StatusOr<std::shared_ptr<const SharedRegion>> Find(const std::string& name) const;
  // By name.
  std::vector<Entry> List() const;

 private:
  explicit SharedRegions(int folder) : folder_(folder) {}

  const int folder_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const SharedRegion>> regions_;  // guarded by mutex_
};

// NOT_FOUND, reason REGION_NOT_FOUND: there is no region of that name.
absl::Status RegionNotFound(std::string_view field, std::string_view name);
// FAILED_PRECONDITION, reason SHARED_MEMORY_OFF: this server has no folder for it. `field` may be empty.
absl::Status SharedMemoryOff(std::string_view field);

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_SHARED_REGIONS_H_
