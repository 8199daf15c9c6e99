#include "server/listen_address.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace layerd {
namespace {

absl::StatusOr<ListenAddress> ParseOne(const std::string& text) {
  ListenAddress address;
  address.text = text;
  if (text.rfind("unix:", 0) == 0) {
    address.is_unix = true;
    address.path = text.substr(5);
    if (address.path.empty() || address.path.size() >= sizeof(sockaddr_un::sun_path)) {
      return absl::InvalidArgumentError(absl::StrCat("expected unix:PATH with a path of 1 to ",
                                                     sizeof(sockaddr_un::sun_path) - 1, " bytes, got '", text, "'"));
    }
    return address;
  }
  const size_t colon = text.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(text.substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected HOST:PORT with a port of 0 to 65535, or unix:PATH, got '", text, "'"));
  }
  return address;
}

}  // namespace

absl::StatusOr<std::vector<ListenAddress>> ParseListenAddresses(std::string_view list) {
  std::vector<ListenAddress> addresses;
  for (const std::string& text : std::vector<std::string>(absl::StrSplit(std::string(list), ','))) {
    auto address = ParseOne(text);
    if (!address.ok()) return address.status();
    addresses.push_back(*std::move(address));
  }
  return addresses;
}

absl::StatusOr<UnixSocketLock> UnixSocketLock::Acquire(const std::string& path) {
  const std::string lock_path = path + ".lock";
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return absl::FailedPreconditionError(absl::StrCat("cannot open ", lock_path, ": ", std::strerror(errno)));
  UnixSocketLock lock(fd, path);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("another server listens on unix:", path));
  }
  struct stat info;
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::FailedPreconditionError(absl::StrCat(path, " exists and is not a socket"));
    }
    unlink(path.c_str());  // its server is gone, or it would hold the lock
  }
  return lock;
}

UnixSocketLock::UnixSocketLock(UnixSocketLock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

// The lock file stays: removing it would let a third server lock a new file while a second holds the old one.
UnixSocketLock::~UnixSocketLock() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace layerd
