#include "lib/resident/store_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <system_error>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_hash.h"

namespace layerd {
namespace {

constexpr char kRecordEnding[] = ".json", kWeightsEnding[] = ".safetensors";
// The record that is being written; there is one at most, under the store's lock.
constexpr char kNewRecord[] = "record.json";
// Large enough for the disk, small enough for a cache of the CPU.
constexpr size_t kGatheredBytes = size_t{1} << 18;

// Links, and what stands where a folder should, count as nothing.
bool IsAbsence(int error) { return error == ENOENT || error == ENOTDIR || error == ELOOP; }

std::string PathOf(const LayerName& name) { return absl::StrCat(name.model, "/", name.layer, kRecordEnding); }

// The part of `name` before `ending`; nothing where it does not end so.
std::optional<std::string> Stem(std::string_view name, std::string_view ending) {
  if (name.size() < ending.size() || name.substr(name.size() - ending.size()) != ending) return std::nullopt;
  return std::string(name.substr(0, name.size() - ending.size()));
}

Descriptor OpenFolder(int folder, const char* name) {
  return Descriptor(openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// Without O_NONBLOCK, opening a pipe would wait for a writer.
Descriptor OpenFile(int folder, const std::string& name) {
  return Descriptor(openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

// 0, or the error. Some file systems have nothing to do for a folder and say EINVAL.
int SyncFolder(int folder) { return fsync(folder) == 0 || errno == EINVAL ? 0 : errno; }

// Locks an open file; false where it cannot be locked, or, without `wait`, another descriptor has it locked.
bool LockFile(int file, bool wait) {
  int result;
  do {
    result = flock(file, LOCK_EX | (wait ? 0 : LOCK_NB));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

// Calls visit(name) for everything in a folder but "." and "..". 0, or the error.
int ForEachIn(int folder, absl::FunctionRef<void(const char* name)> visit) {
  // A descriptor of its own, since the place in the folder belongs to the descriptor.
  const int descriptor = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return errno;
  DIR* entries = fdopendir(descriptor);
  if (entries == nullptr) {
    const int error = errno;
    close(descriptor);
    return error;
  }
  int error = 0;
  for (;;) {
    errno = 0;
    const dirent* entry = readdir(entries);
    if (entry == nullptr) {
      error = errno;
      break;
    }
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") visit(entry->d_name);
  }
  closedir(entries);
  return error;
}

// 0, or the error.
int WriteAll(int file, absl::Span<const std::byte> bytes, int64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(file, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno != EINTR) return errno;
    if (written <= 0) continue;
    bytes.remove_prefix(static_cast<size_t>(written));
    offset += written;
  }
  return 0;
}

int64_t Nanoseconds(const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

RecordStamp StampFrom(const struct stat& status) {
  return {.inode = status.st_ino,
          .size = status.st_size,
          .modified_ns = Nanoseconds(status.st_mtim),
          .changed_ns = Nanoseconds(status.st_ctim)};
}

}  // namespace

absl::Status StoreFault(std::string_view path, std::string_view what, int error) {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  ErrorDetails details;
  details.reason = full ? "DISK_FULL" : "STORE_IO";
  details.field = "layer_store";
  if (full) details.retry_delay_ms = -1;
  return WithDetails(full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kInternal,
                     absl::StrCat("layer_store: ", std::string(what), ": ", std::generic_category().message(error),
                                  ": ", Quoted(path)),
                     details);
}

Descriptor::~Descriptor() {
  if (descriptor_ >= 0) close(descriptor_);
}

UploadFile::UploadFile(int folder, std::string name, Descriptor file)
    : folder_(folder), name_(std::move(name)), file_(std::move(file)) {}

UploadFile::~UploadFile() {
  if (!name_.empty()) unlinkat(folder_, name_.c_str(), 0);
}

absl::Status UploadFile::Append(absl::Span<const std::byte> bytes) {
  if (gathered_.empty() && bytes.size() >= kGatheredBytes) return WriteOut(bytes);
  while (!bytes.empty()) {
    if (gathered_.capacity() == 0) gathered_.reserve(kGatheredBytes);
    const size_t count = std::min(bytes.size(), kGatheredBytes - gathered_.size());
    gathered_.insert(gathered_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count));
    bytes.remove_prefix(count);
    if (gathered_.size() < kGatheredBytes) continue;
    if (auto status = WriteOut(gathered_); !status.ok()) return status;
    gathered_.clear();
  }
  return absl::OkStatus();
}

absl::Status UploadFile::WriteOut(absl::Span<const std::byte> bytes) {
  if (const int error = WriteAll(file_.get(), bytes, written_); error != 0) {
    return StoreFault("uploads", "an upload cannot be written", error);
  }
  written_ += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status UploadFile::Sync() {
  if (auto status = WriteOut(gathered_); !status.ok()) return status;
  gathered_.clear();
  if (fsync(file_.get()) != 0) return StoreFault("uploads", "an upload cannot be written", errno);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<StoreFiles>> StoreFiles::Open(const std::string& folder) {
  const auto unusable = [&](std::string_view path, int error) {
    ErrorDetails details;
    details.reason = "STORE_UNUSABLE";
    details.field = "layer_store";
    return WithDetails(absl::StatusCode::kFailedPrecondition,
                       absl::StrCat("layer_store: expected a folder that can be written: ",
                                    std::generic_category().message(error), ": ", Quoted(path)),
                       details);
  };
  if (folder.find('\0') != std::string::npos) return unusable(folder, ENOENT);
  const Descriptor root(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!root.is_open()) return unusable(folder, errno);
  std::shared_ptr<StoreFiles> files(new StoreFiles);
  for (const auto& [name, member] :
       {std::pair("layers", &StoreFiles::layers_), std::pair("weights", &StoreFiles::weights_),
        std::pair("uploads", &StoreFiles::uploads_)}) {
    const bool made = mkdirat(root.get(), name, 0777) == 0 || errno == EEXIST;
    if (made) (*files).*member = OpenFolder(root.get(), name);
    if (!((*files).*member).is_open()) return unusable(absl::StrCat(folder, "/", name), errno);
  }
  files->lock_file_ =
      Descriptor(openat(root.get(), "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
  if (!files->lock_file_.is_open()) return unusable(absl::StrCat(folder, "/lock"), errno);
  if (const int error = SyncFolder(root.get()); error != 0) return unusable(folder, error);
  return files;
}

StoreFiles::Lock::~Lock() {
  if (mutex_.owns_lock()) flock(file_, LOCK_UN);
}

absl::StatusOr<StoreFiles::Lock> StoreFiles::Acquire() {
  std::unique_lock<std::mutex> mutex(mutex_);
  if (!LockFile(lock_file_.get(), /*wait=*/true)) return StoreFault("lock", "the store cannot be locked", errno);
  return Lock(std::move(mutex), lock_file_.get());
}

absl::Status StoreFiles::ListRecords(std::vector<LayerName>& names) const {
  absl::Status status;
  const auto check = [&](const std::string& path, int error) {
    if (error != 0 && !IsAbsence(error)) status = StoreFault(path, "the layers cannot be listed", error);
  };
  const int error = ForEachIn(layers_.get(), [&](const char* model) {
    if (!IsNamePart(model)) return;
    const Descriptor folder = OpenFolder(layers_.get(), model);
    const int model_error = !folder.is_open() ? errno : ForEachIn(folder.get(), [&](const char* file) {
      const auto layer = Stem(file, kRecordEnding);
      if (layer && IsNamePart(*layer)) names.push_back({model, *layer});
    });
    check(absl::StrCat("layers/", model), model_error);
  });
  check("layers", error);
  return status;
}

absl::StatusOr<std::optional<RecordStamp>> StoreFiles::StampOf(const LayerName& name) const {
  const std::string path = PathOf(name);
  struct stat folder, file;
  if (fstatat(layers_.get(), name.model.c_str(), &folder, AT_SYMLINK_NOFOLLOW) != 0 ||
      (S_ISDIR(folder.st_mode) && fstatat(layers_.get(), path.c_str(), &file, AT_SYMLINK_NOFOLLOW) != 0)) {
    if (IsAbsence(errno)) return std::nullopt;
    return StoreFault(absl::StrCat("layers/", path), "a record cannot be examined", errno);
  }
  if (!S_ISDIR(folder.st_mode) || !S_ISREG(file.st_mode)) return std::nullopt;
  return StampFrom(file);
}

absl::StatusOr<std::optional<RecordFile>> StoreFiles::ReadRecord(const LayerName& name) const {
  const std::string path = absl::StrCat("layers/", PathOf(name));
  const Descriptor folder = OpenFolder(layers_.get(), name.model.c_str());
  const Descriptor file = folder.is_open() ? OpenFile(folder.get(), name.layer + kRecordEnding) : Descriptor();
  if (!file.is_open()) {
    if (IsAbsence(errno)) return std::nullopt;
    return StoreFault(path, "a record cannot be opened", errno);
  }
  struct stat status;
  if (fstat(file.get(), &status) != 0) return StoreFault(path, "a record cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) return std::nullopt;
  RecordFile record{StampFrom(status), {}};
  record.text.resize(std::min(static_cast<size_t>(status.st_size), kMaxRecordBytes + 1));
  size_t done = 0;
  while (done < record.text.size()) {
    const ssize_t got =
        pread(file.get(), record.text.data() + done, record.text.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return StoreFault(path, "a record cannot be read", errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  record.text.resize(done);
  return record;
}

absl::StatusOr<Descriptor> StoreFiles::OpenWeights(const std::string& sha256) const {
  Descriptor file = OpenFile(weights_.get(), sha256 + kWeightsEnding);
  if (!file.is_open() && !IsAbsence(errno)) {
    return StoreFault(absl::StrCat("weights/", sha256, kWeightsEnding), "weights cannot be opened", errno);
  }
  return file;
}

absl::Status StoreFiles::CheckModel(const std::string& model) const {
  if (!IsNamePart(model)) return absl::OkStatus();
  const Descriptor folder = OpenFolder(layers_.get(), model.c_str());
  if (folder.is_open() || errno == ENOENT) return absl::OkStatus();
  return StoreFault(absl::StrCat("layers/", model), "the model's folder cannot be used", errno);
}

absl::StatusOr<int64_t> StoreFiles::UsedBytes(const Lock&) const {
  int64_t used = 0;
  for (const auto& [name, folder] : {std::pair("weights", weights_.get()), std::pair("uploads", uploads_.get())}) {
    const int error = ForEachIn(folder, [&, one = folder](const char* file) {
      struct stat status;
      if (fstatat(one, file, &status, AT_SYMLINK_NOFOLLOW) == 0) used += status.st_size;
    });
    if (error != 0) return StoreFault(name, "the sizes of files cannot be had", error);
  }
  return used;
}

absl::StatusOr<std::unique_ptr<UploadFile>> StoreFiles::CreateUpload(const Lock&, int64_t size_bytes) {
  constexpr char kWhat[] = "an upload cannot be begun";
  std::string name;
  Descriptor file;
  for (int number = 0; !file.is_open(); ++number) {
    name = absl::StrCat(getpid(), "-", number, ".partial");
    file = Descriptor(openat(uploads_.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file.is_open() && errno != EEXIST) return StoreFault("uploads", kWhat, errno);
  }
  const int descriptor = file.get();
  auto upload = std::make_unique<UploadFile>(uploads_.get(), std::move(name), std::move(file));
  if (!LockFile(descriptor, /*wait=*/false)) return StoreFault("uploads", kWhat, errno);
  int result;
  do {
    result = fallocate(descriptor, 0, 0, size_bytes);
  } while (result != 0 && errno == EINTR);
  // Where space cannot be set aside, the size alone still counts for the quota.
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) result = ftruncate(descriptor, size_bytes);
  if (result != 0) return StoreFault("uploads", "space for an upload cannot be had", errno);
  return upload;
}

absl::Status StoreFiles::MakeWeights(const Lock&, UploadFile& upload, const std::string& sha256) {
  const std::string name = sha256 + kWeightsEnding;
  int error = renameat(uploads_.get(), upload.name_.c_str(), weights_.get(), name.c_str()) == 0 ? 0 : errno;
  if (error == 0) {
    upload.name_.clear();
    error = SyncFolder(weights_.get());
  }
  return error == 0 ? absl::OkStatus() : StoreFault("weights/" + name, "weights cannot be stored", error);
}

absl::Status StoreFiles::WriteRecord(const Lock&, const LayerName& name, std::string_view text) {
  const auto fault = [&](int error) {
    unlinkat(uploads_.get(), kNewRecord, 0);
    return StoreFault(absl::StrCat("layers/", PathOf(name)), "a record cannot be written", error);
  };
  unlinkat(uploads_.get(), kNewRecord, 0);
  const Descriptor file(openat(uploads_.get(), kNewRecord, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file.is_open()) return fault(errno);
  const auto bytes = absl::MakeSpan(reinterpret_cast<const std::byte*>(text.data()), text.size());
  if (const int error = WriteAll(file.get(), bytes, 0); error != 0) return fault(error);
  // The system's own times are as coarse as its clock's tick: within one, a new file could have the inode number, size
  // and times of one just deleted, and be taken for it.
  timespec times[2];
  clock_gettime(CLOCK_REALTIME, &times[0]);
  times[1] = times[0];
  if (futimens(file.get(), times) != 0 || fsync(file.get()) != 0) return fault(errno);
  if (mkdirat(layers_.get(), name.model.c_str(), 0777) != 0 && errno != EEXIST) return fault(errno);
  const Descriptor folder = OpenFolder(layers_.get(), name.model.c_str());
  if (!folder.is_open() ||
      renameat(uploads_.get(), kNewRecord, folder.get(), (name.layer + kRecordEnding).c_str()) != 0) {
    return fault(errno);
  }
  // The model's folder may be new, or made by a process that was killed before this.
  for (const int one : {folder.get(), layers_.get()}) {
    if (const int error = SyncFolder(one); error != 0) return fault(error);
  }
  return absl::OkStatus();
}

absl::Status StoreFiles::RemoveRecord(const Lock&, const LayerName& name) {
  const Descriptor folder = OpenFolder(layers_.get(), name.model.c_str());
  int error = folder.is_open() && unlinkat(folder.get(), (name.layer + kRecordEnding).c_str(), 0) == 0 ? 0 : errno;
  if (error == 0) error = SyncFolder(folder.get());
  return error == 0 ? absl::OkStatus()
                    : StoreFault(absl::StrCat("layers/", PathOf(name)), "a record cannot be deleted", error);
}

void StoreFiles::RemoveDeadUploads(const Lock&) {
  ForEachIn(uploads_.get(), [&](const char* name) {
    // Files are made and locked under the store's lock, so one that can be locked has lost its writer. What cannot be
    // opened, as another user's, cannot be judged.
    const Descriptor file = OpenFile(uploads_.get(), name);
    if (file.is_open() && LockFile(file.get(), /*wait=*/false)) unlinkat(uploads_.get(), name, 0);
  });
}

void StoreFiles::RemoveWeightsBut(const Lock&, const std::set<std::string>& named) {
  std::set<std::string> missing = named, others;
  const int error = ForEachIn(weights_.get(), [&](const char* name) {
    const auto sha256 = Stem(name, kWeightsEnding);
    if (sha256 && IsSha256(*sha256) && missing.erase(*sha256) == 0) others.insert(name);
  });
  if (error != 0 || !missing.empty()) return;
  for (const std::string& name : others) unlinkat(weights_.get(), name.c_str(), 0);
}

void StoreFiles::RemoveEmptyModels(const Lock&) {
  ForEachIn(layers_.get(), [&](const char* name) {
    // Refused by the system for a folder that is not empty, and for what is no folder.
    if (IsNamePart(name)) unlinkat(layers_.get(), name, AT_REMOVEDIR);
  });
}

}  // namespace layerd
