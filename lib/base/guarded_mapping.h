// A file in memory whose pages may vanish. Whoever shares the file may truncate it at any moment; whoever touches a page
// beyond its end then gets SIGBUS, and so does whoever writes to a page for which a full file system has no room.
//
// One handler for the process, installed by the first mapping, survives that. Where the address is in a live mapping, it
// notes the damage and puts memory of our own in place of everything from that page on; the instruction goes on. Any other
// SIGBUS is handled as it was before: the former handler is put back, and the fault comes again.
//
// That memory is the same for all, over and over again: 64 MiB whatever is missing, so that nobody can make this process
// need more by truncating files. What is read there is anything, and what is written may be overwritten at once.
//
// Instructions alone are guarded: a system call on memory that has vanished fails with EFAULT.
#ifndef LAYERD_LIB_BASE_GUARDED_MAPPING_H_
#define LAYERD_LIB_BASE_GUARDED_MAPPING_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace layerd {

// Threads: any, but for the destructor: nobody may touch the memory any more.
class GuardedMapping {
 public:
  static constexpr int kMostMappings = 2048;
  // Of all mappings together: what can be replaced in pieces that the system has room to note.
  static constexpr size_t kMostBytes = size_t{1} << 40;

  // Maps the first `size` bytes of `fd`, at least 1, shared, to be read and written. RESOURCE_EXHAUSTED, with details, for
  // more than kMostMappings or kMostBytes, or where the system maps no more. `fd` may be closed after that.
  static absl::StatusOr<std::unique_ptr<GuardedMapping>> Map(int fd, size_t size);
  GuardedMapping(const GuardedMapping&) = delete;
  GuardedMapping& operator=(const GuardedMapping&) = delete;
  ~GuardedMapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  // Whether a page was missing when it was touched: what was read there is worth nothing, and what was written is lost.
  bool damaged() const;

 private:
  GuardedMapping(std::byte* data, size_t size, int slot) : data_(data), size_(size), slot_(slot) {}

  std::byte* const data_;
  const size_t size_;
  const int slot_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_GUARDED_MAPPING_H_
