// The addresses that layerd listens on, and the guard that keeps two servers off one unix socket.
#ifndef LAYERD_SERVER_LISTEN_ADDRESS_H_
#define LAYERD_SERVER_LISTEN_ADDRESS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace layerd {

struct ListenAddress {
  bool is_unix = false;
  std::string text;  // "127.0.0.1:50051", "[::1]:0" or "unix:/run/layerd.sock", as gRPC takes it
  std::string path;  // of a unix socket
};

// Reads "HOST:PORT" and "unix:PATH", separated by commas; port 0 lets the system choose. INVALID_ARGUMENT otherwise.
absl::StatusOr<std::vector<ListenAddress>> ParseListenAddresses(std::string_view list);

// Holds PATH.lock for as long as it lives, so that a second server is refused instead of silently taking the path over;
// removes a socket that a server which died left behind. Movable; not for more than one thread.
class UnixSocketLock {
 public:
  // FAILED_PRECONDITION when another server holds the path, or something that is no socket lies there.
  static absl::StatusOr<UnixSocketLock> Acquire(const std::string& path);
  UnixSocketLock(UnixSocketLock&& other) noexcept;
  UnixSocketLock& operator=(UnixSocketLock&& other) = delete;
  ~UnixSocketLock();

 private:
  UnixSocketLock(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

}  // namespace layerd

#endif  // LAYERD_SERVER_LISTEN_ADDRESS_H_
