#include "lib/weights/checkpoint_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

// Where the open file `descriptor` lies now; empty where the system does not tell (no /proc).
std::string PlaceOf(int descriptor) {
  char place[PATH_MAX];
  const ssize_t length = readlink(absl::StrCat("/proc/self/fd/", descriptor).c_str(), place, sizeof(place));
  // A path that fills the buffer may be cut short.
  if (length <= 0 || static_cast<size_t>(length) >= sizeof(place)) return "";
  return std::string(place, static_cast<size_t>(length));
}

// `path` without links; empty where there is nothing.
std::string RealPath(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(path.c_str(), nullptr), &std::free);
  return real == nullptr ? "" : std::string(real.get());
}

bool IsBeneath(const std::string& place, const std::string& folder) {
  return !folder.empty() && absl::StartsWith(place, folder == "/" ? folder : absl::StrCat(folder, "/"));
}

}  // namespace

bool IsSafetensorsName(std::string_view name) {
  return absl::EndsWith(std::string(name), ".safetensors") && name.front() != '.' &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

bool LiesInByPath(int file, const std::string& name, const std::string& folder) {
  const std::string real = RealPath(absl::StrCat(folder, "/", name));
  struct stat opened, found;
  return IsBeneath(real, RealPath(folder)) && fstat(file, &opened) == 0 && stat(real.c_str(), &found) == 0 &&
         opened.st_dev == found.st_dev && opened.st_ino == found.st_ino;
}

absl::StatusOr<CheckpointFolder> CheckpointFolder::Open(const std::string& path) {
  if (path.find('\0') != std::string::npos) return FileError(path, "cannot be opened", ENOENT);
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return FileError(path, "cannot be opened", errno);
  return CheckpointFolder(descriptor, path);
}

CheckpointFolder::~CheckpointFolder() {
  if (descriptor_ >= 0) close(descriptor_);
}

CheckpointFolder::CheckpointFolder(CheckpointFolder&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

bool CheckpointFolder::Contains(const InputFile& file, const std::string& name) const {
  const std::string folder = PlaceOf(descriptor_);
  if (folder.empty()) return LiesInByPath(file.descriptor(), name, path_);
  return IsBeneath(PlaceOf(file.descriptor()), folder);
}

absl::StatusOr<InputFile> CheckpointFolder::OpenFile(const std::string& name) const {
  // Texts have the plain name: where the folder lies is nothing for callers from outside.
  auto file = InputFile::OpenAt(descriptor_, name, name);
  if (!file.ok()) return file;
  if (name.find('/') == std::string::npos && Contains(*file, name)) return file;
  return InvalidField(
      "file", "CHECKPOINT_OUTSIDE",
      absl::StrCat("expected a file of the checkpoint's own folder, got a link out of it: ", Quoted(name)));
}

absl::StatusOr<std::optional<std::string>> CheckpointFolder::ReadText(const std::string& name, uint64_t max_bytes,
                                                                      std::string_view reason) const {
  const auto file = OpenFile(name);
  if (!file.ok()) {
    if (file.status().code() == absl::StatusCode::kNotFound) return std::optional<std::string>();
    return file.status();
  }
  if (file->size() > max_bytes) {
    return InvalidField("file", reason,
                        absl::StrCat(Quoted(name), ": the file is too long: expected at most ", max_bytes,
                                     " bytes, got ", file->size()));
  }
  std::string text(file->size(), ' ');
  const absl::Status read = file->ReadAt(0, absl::MakeSpan(reinterpret_cast<std::byte*>(text.data()), text.size()));
  if (!read.ok()) return read;
  return std::optional(std::move(text));
}

absl::StatusOr<std::vector<std::string>> CheckpointFolder::SafetensorsNames() const {
  const int descriptor = openat(descriptor_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(descriptor < 0 ? nullptr : fdopendir(descriptor), &closedir);
  if (folder == nullptr) {
    const int error = errno;
    if (descriptor >= 0) close(descriptor);
    return FileError(path_, "cannot be read", error);
  }
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    // Nobody else reads this stream.
    const dirent* entry = readdir(folder.get());  // NOLINT(concurrency-mt-unsafe)
    if (entry == nullptr) break;
    if (IsSafetensorsName(entry->d_name)) names.emplace_back(entry->d_name);
  }
  if (errno != 0) return FileError(path_, "cannot be read", errno);
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::string> CheckpointFolder::Fingerprint() const {
  auto names = SafetensorsNames();
  if (!names.ok()) return names.status();
  std::string fingerprint;
  bool any = !names->empty();
  for (const char* name : {kConfigFile, kDescriptionFile, kIndexFile}) names->emplace_back(name);
  for (const std::string& name : *names) {
    struct stat status;
    // A link that leads nowhere is told from no link at all.
    if (fstatat(descriptor_, name.c_str(), &status, 0) != 0 &&
        fstatat(descriptor_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;
      return FileError(absl::StrCat(path_, "/", name), "cannot be examined", errno);
    }
    any = any || name == kIndexFile;
    absl::StrAppend(&fingerprint, absl::CEscape(name), " ", status.st_size, " ", status.st_dev, ":", status.st_ino);
    for (const timespec& time : {status.st_mtim, status.st_ctim}) {
      absl::StrAppend(&fingerprint, " ", time.tv_sec, ".", time.tv_nsec);
    }
    fingerprint += "\n";
  }
  return any ? fingerprint : std::string();
}

}  // namespace layerd
