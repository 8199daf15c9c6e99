// What the file formats here share: reading a regular file at an offset, replacing a file whole, and names in texts.
//
// Errors have the field "file" and the system's own words; NOT_FOUND where the file (or the folder to write in) does
// not exist, PERMISSION_DENIED where it may not be used, INVALID_ARGUMENT where it is no regular file or ends too
// early, RESOURCE_EXHAUSTED where the disk is full, INTERNAL for other faults of the system.
//
// Threads: InputFile's const methods from any number of threads; the functions too.
#ifndef LAYERD_LIB_WEIGHTS_FILE_IO_H_
#define LAYERD_LIB_WEIGHTS_FILE_IO_H_

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "lib/base/errors.h"

namespace layerd {

// `name` in double quotes, shortened, control characters escaped: fit for a text that a terminal or a log shows.
inline std::string Quoted(std::string_view name) {
  return absl::StrCat("\"", absl::Utf8SafeCEscape(Shortened(name)), "\"");
}

// The part of `path` after the last slash, and the part up to and with it (empty where there is none).
inline std::string BaseName(std::string_view path) { return std::string(path.substr(path.rfind('/') + 1)); }
inline std::string FolderOf(std::string_view path) { return std::string(path.substr(0, path.rfind('/') + 1)); }

// The error for a system call on `path` that failed with `error`; `what` is "cannot be opened" and the like.
inline absl::Status FileError(std::string_view path, std::string_view what, int error) {
  absl::StatusCode code = absl::StatusCode::kInternal;
  ErrorDetails details;
  details.reason = "FILE_IO";
  details.field = "file";
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case ENAMETOOLONG:
    case ELOOP:
      code = absl::StatusCode::kNotFound;
      details.reason = "FILE_NOT_FOUND";
      details.resource_type = "file";
      details.resource_name = std::string(path);
      break;
    case EACCES:
    case EPERM:
    case EROFS:
      code = absl::StatusCode::kPermissionDenied;
      details.reason = "FILE_NOT_PERMITTED";
      break;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      code = absl::StatusCode::kResourceExhausted;
      details.reason = "DISK_FULL";
      break;
    default:
      break;
  }
  // The end of a long path says more than its beginning.
  constexpr size_t kShownPathBytes = 512;
  if (path.size() > kShownPathBytes) path.remove_prefix(path.size() - kShownPathBytes);
  return WithDetails(code,
                     absl::StrCat("file: ", std::string(what), ": ", std::generic_category().message(error), ": ",
                                  absl::Utf8SafeCEscape(std::string(path))),
                     details);
}

// Owns an open regular file.
class InputFile {
 public:
  static absl::StatusOr<InputFile> Open(const std::string& path) { return OpenAt(AT_FDCWD, path, path); }

  // The file `name` relative to the open folder `folder`; `path` stands for it in texts.
  static absl::StatusOr<InputFile> OpenAt(int folder, const std::string& name, const std::string& path) {
    if (name.find('\0') != std::string::npos) return FileError(path, "cannot be opened", ENOENT);
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    InputFile file(openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.descriptor_ < 0) return FileError(path, "cannot be opened", errno);
    if (fstat(file.descriptor_, &file.opened_) != 0) return FileError(path, "cannot be examined", errno);
    if (!S_ISREG(file.opened_.st_mode)) {
      return InvalidField("file", "FILE_NOT_REGULAR", absl::StrCat("expected a regular file, got ", Quoted(path)));
    }
    file.path_ = path;
    return file;
  }

  ~InputFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  InputFile(InputFile&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), opened_(other.opened_), path_(std::move(other.path_)) {}
  InputFile& operator=(InputFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    opened_ = other.opened_;
    path_ = std::move(other.path_);
    return *this;
  }

  const std::string& path() const { return path_; }
  uint64_t size() const { return static_cast<uint64_t>(opened_.st_size); }  // as it was when the file was opened
  int descriptor() const { return descriptor_; }

  // Whether nobody has written to the file since it was opened, as size and time of modification tell. A file that was
  // replaced by another of its name stays what it was.
  bool IsUnchanged() const {
    struct stat now;
    // Not by the time of the last change (ctime): moving a file, or replacing it, changes that too.
    return fstat(descriptor_, &now) == 0 && now.st_size == opened_.st_size &&
           now.st_mtim.tv_sec == opened_.st_mtim.tv_sec && now.st_mtim.tv_nsec == opened_.st_mtim.tv_nsec;
  }

  // Fills `out` with the bytes from `offset` on, which must lie within size().
  absl::Status ReadAt(uint64_t offset, absl::Span<std::byte> out) const {
    while (!out.empty()) {
      const ssize_t got = pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return FileError(path_, "cannot be read", errno);
      if (got == 0) {
        return InvalidField("file", "FILE_TRUNCATED",
                            absl::StrCat("the file became shorter while it was read: expected ", size(), " bytes, got ",
                                         offset, ": ", Quoted(BaseName(path_))));
      }
      out.remove_prefix(static_cast<size_t>(got));
      offset += static_cast<uint64_t>(got);
    }
    return absl::OkStatus();
  }

 private:
  explicit InputFile(int descriptor) : descriptor_(descriptor) {}

  int descriptor_;
  struct stat opened_ {};  // as it was then
  std::string path_;
};

// Writes `parts` one after the other to a temporary file in the folder of `path`, makes them durable and gives the file
// its name: a reader finds the old file or the new one, and an error leaves the old one as it was. A link is replaced,
// not followed; what is no regular file (a device, say) is refused.
inline absl::Status ReplaceFile(const std::string& path, absl::Span<const absl::Span<const std::byte>> parts) {
  if (path.find('\0') != std::string::npos) return FileError(path, "cannot be written", ENOENT);
  struct stat status;
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return InvalidField("file", "FILE_NOT_REGULAR",
                        absl::StrCat("expected a regular file or a new name to write to, got ", Quoted(path)));
  }
  // The process id alone is not unique: in containers it is always 1, and a crash may have left its file behind.
  static std::atomic<uint64_t> counter{0};
  const std::string folder = FolderOf(path);
  std::string temporary;
  int descriptor = -1;
  for (int attempt = 0; descriptor < 0 && attempt < 1000; ++attempt) {
    temporary = absl::StrCat(folder, ".layerd-", getpid(), "-", counter.fetch_add(1), ".tmp");
    descriptor = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0 && errno != EEXIST) break;
  }
  if (descriptor < 0) return FileError(path, "cannot be written", errno);

  int error = 0;
  for (absl::Span<const std::byte> rest : parts) {
    while (error == 0 && !rest.empty()) {
      const ssize_t written = write(descriptor, rest.data(), rest.size());
      if (written >= 0) {
        rest.remove_prefix(static_cast<size_t>(written));
      } else if (errno != EINTR) {
        error = errno;
      }
    }
  }
  if (error == 0 && fsync(descriptor) != 0) error = errno;
  if (close(descriptor) != 0 && error == 0) error = errno;
  if (error == 0 && rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    unlink(temporary.c_str());
    return FileError(path, "cannot be written", error);
  }
  // The new name must survive a crash too. Some file systems cannot do that for a folder; the file itself is good.
  const int folder_descriptor = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_descriptor >= 0) {
    (void)fsync(folder_descriptor);
    close(folder_descriptor);
  }
  return absl::OkStatus();
}

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_FILE_IO_H_
