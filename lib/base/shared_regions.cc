#include "lib/base/shared_regions.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

std::string Quoted(std::string_view text) { return absl::StrCat("\"", absl::Utf8SafeCEscape(Shortened(text)), "\""); }

absl::Status Refused(absl::StatusCode code, std::string_view field, std::string_view reason, const std::string& text) {
  ErrorDetails details;
  details.reason = std::string(reason);
  details.field = std::string(field);
  return WithDetails(code, field.empty() ? text : absl::StrCat(std::string(field), ": ", text), details);
}

bool IsName(std::string_view name) {
  const auto is_legal = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  };
  return !name.empty() && name.size() <= SharedRegions::kMostNameBytes &&
         std::all_of(name.begin(), name.end(), is_legal);
}

absl::Status CheckFileName(const std::string& file) {
  if (file.empty()) return MissingField("file", "expected the name of a file in --shared_memory_dir, got nothing");
  if (file != "." && file != ".." && file.find('/') == std::string::npos && file.find('\0') == std::string::npos) {
    return absl::OkStatus();
  }
  return InvalidField("file", "BAD_NAME",
                      absl::StrCat("expected the name of a file in --shared_memory_dir, no path, got ", Quoted(file)));
}

absl::Status NotARegularFile(const std::string& file) {
  return InvalidField("file", "NOT_A_REGULAR_FILE",
                      absl::StrCat("expected a regular file in --shared_memory_dir, got ", Quoted(file),
                                   ", which is a link, a folder, a pipe or the like"));
}

absl::Status CannotOpen(const std::string& file, int error) {
  switch (error) {
    case ELOOP:   // a link
    case EISDIR:  // a folder
    case ENXIO:   // a socket
      return NotARegularFile(file);
    case ENOENT:
      return Refused(absl::StatusCode::kNotFound, "file", "FILE_NOT_FOUND",
                     absl::StrCat("there is no file ", Quoted(file), " in --shared_memory_dir"));
    default:
      return Refused(absl::StatusCode::kFailedPrecondition, "file", "FILE_NOT_OPENED",
                     absl::StrCat("expected a file that the server may read and write, got ", Quoted(file), ": ",
                                  std::generic_category().message(error)));
  }
}

// Closes a file unless it is released.
class OpenFile {
 public:
  explicit OpenFile(int fd) : fd_(fd) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedRegion::Open(int folder, const std::string& file) {
  if (auto status = CheckFileName(file); !status.ok()) return status;
  // O_NONBLOCK: what is no regular file may make one wait.
  OpenFile opened(openat(folder, file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
  if (opened.get() < 0) return CannotOpen(file, errno);
  struct stat status;
  if (fstat(opened.get(), &status) != 0) return CannotOpen(file, errno);
  if (!S_ISREG(status.st_mode)) return NotARegularFile(file);
  if (status.st_size == 0) {
    return Refused(absl::StatusCode::kFailedPrecondition, "file", "EMPTY_FILE",
                   absl::StrCat("expected a file of 1 byte or more, got ", Quoted(file), " of 0 bytes"));
  }
  // Who makes the memory is charged for it, and hears of a full file system.
  constexpr int64_t kBlockBytes = 512;
  if (status.st_blocks * kBlockBytes < status.st_size) {
    return Refused(absl::StatusCode::kFailedPrecondition, "file", "SPARSE_FILE",
                   absl::StrCat("expected a file that has memory for all of its ", status.st_size,
                                " bytes (posix_fallocate), got ", Quoted(file), " with ",
                                status.st_blocks * kBlockBytes, " bytes"));
  }
  auto mapping = GuardedMapping::Map(opened.get(), static_cast<size_t>(status.st_size));
  if (!mapping.ok()) return Under("file", mapping.status());
  return std::shared_ptr<const SharedRegion>(
      new SharedRegion(file, opened.Release(), status.st_dev, status.st_ino, *std::move(mapping)));
}

SharedRegion::SharedRegion(std::string file, int fd, dev_t device, ino_t inode, std::unique_ptr<GuardedMapping> mapping)
    : file_(std::move(file)), fd_(fd), device_(device), inode_(inode), mapping_(std::move(mapping)) {}

SharedRegion::~SharedRegion() { close(fd_); }

absl::Status SharedRegion::CheckIntact() const {
  struct stat now;
  const int64_t bytes = fstat(fd_, &now) == 0 ? now.st_size : 0;
  if (bytes < size_bytes()) {
    return Refused(absl::StatusCode::kFailedPrecondition, "", "REGION_TRUNCATED",
                   absl::StrCat("expected the file ", Quoted(file_), " to have ", size_bytes(),
                                " bytes, as when it was registered, got ", bytes));
  }
  if (mapping_->damaged()) {
    return Refused(
        absl::StatusCode::kFailedPrecondition, "", "REGION_DAMAGED",
        absl::StrCat("expected all pages of the file ", Quoted(file_),
                     ", got none when one was touched: it was truncated, or its file system is full; register "
                     "it again"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SharedRegions>> SharedRegions::Open(const std::string& folder) {
  const int fd = open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot open the folder ", folder, ": ", std::generic_category().message(errno)));
  }
  return std::unique_ptr<SharedRegions>(new SharedRegions(fd));
}

SharedRegions::~SharedRegions() { close(folder_); }

absl::StatusOr<SharedRegions::Entry> SharedRegions::Register(const std::string& name, const std::string& file) {
  if (name.empty()) return MissingField("name", "expected a name for the region, got nothing");
  if (!IsName(name)) {
    return InvalidField(
        "name", "BAD_NAME",
        absl::StrCat("expected at most ", kMostNameBytes, " letters, digits, '.', '_' and '-', got ", Quoted(name)));
  }
  auto opened = SharedRegion::Open(folder_, file);
  if (!opened.ok()) return opened.status();
  std::shared_ptr<const SharedRegion> region = *std::move(opened);  // what it replaces is freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [other_name, other] : regions_) {
    if (other_name != name && other->IsSameFile(*region)) {
      return Refused(absl::StatusCode::kAlreadyExists, "file", "REGION_EXISTS",
                     absl::StrCat("expected a file that is no region yet, got ", Quoted(file), ", which is the region ",
                                  Quoted(other_name)));
    }
  }
  const auto found = regions_.find(name);
  if (found == regions_.end()) {
    if (regions_.size() >= kMostRegions) {
      return TooLarge("name", "TOO_MANY_REGIONS",
                      absl::StrCat("expected at most ", kMostRegions, " regions; unregister one"));
    }
    regions_.emplace(name, region);
    return Entry{name, region};
  }
  if (!found->second->IsSameFile(*region)) {
    return Refused(absl::StatusCode::kAlreadyExists, "name", "REGION_EXISTS",
                   absl::StrCat("the region ", Quoted(name), " has another file, ", Quoted(found->second->file())));
  }
  if (found->second->CheckIntact().ok() && found->second->size_bytes() == region->size_bytes()) {
    return Entry{name, found->second};
  }
  std::swap(found->second, region);
  return Entry{name, found->second};
}

absl::Status SharedRegions::Unregister(const std::string& name) {
  std::shared_ptr<const SharedRegion> region;  // freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = regions_.find(name);
  if (found == regions_.end()) return RegionNotFound("name", name);
  region = std::move(found->second);
  regions_.erase(found);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedRegions::Find(const std::string& name) const {
  std::shared_ptr<const SharedRegion> region;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = regions_.find(name);
    if (found == regions_.end()) return RegionNotFound("region", name);
    region = found->second;
  }
  if (auto status = region->CheckIntact(); !status.ok()) return status;
  return region;
}

std::vector<SharedRegions::Entry> SharedRegions::List() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> entries;
  for (const auto& [name, region] : regions_) entries.push_back({name, region});
  return entries;
}

absl::Status RegionNotFound(std::string_view field, std::string_view name) {
  ErrorDetails details;
  details.reason = "REGION_NOT_FOUND";
  details.field = std::string(field);
  details.resource_type = "shared_memory_region";
  details.resource_name = Shortened(name);
  return WithDetails(absl::StatusCode::kNotFound,
                     absl::StrCat(std::string(field), ": there is no region ", Quoted(name)), details);
}

absl::Status SharedMemoryOff(std::string_view field) {
  return Refused(absl::StatusCode::kFailedPrecondition, field, "SHARED_MEMORY_OFF",
                 "expected a server with --shared_memory_dir, got one without");
}

}  // namespace layerd
