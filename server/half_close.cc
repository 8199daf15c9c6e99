#include "server/half_close.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

namespace layerd {
namespace {

// Whether the socket's own end is one of the addresses. A connection that a listener accepted has its listener's.
bool IsOurs(int fd, const std::vector<int>& ports, const std::vector<std::string>& paths) {
  sockaddr_storage address;
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return false;
  if (address.ss_family == AF_UNIX) {
    const auto* local = reinterpret_cast<const sockaddr_un*>(&address);
    if (length <= offsetof(sockaddr_un, sun_path)) return false;
    return std::find(paths.begin(), paths.end(), std::string(local->sun_path)) != paths.end();
  }
  int port = 0;
  if (address.ss_family == AF_INET) port = ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  if (address.ss_family == AF_INET6) port = ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  return port != 0 && std::find(ports.begin(), ports.end(), port) != ports.end();
}

bool IsListening(int fd) {
  int listening = 0;
  socklen_t length = sizeof(listening);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) == 0 && listening != 0;
}

}  // namespace

void HalfCloseConnections(const std::vector<int>& ports, const std::vector<std::string>& paths) {
  // Listeners first: a caller whose connection ends comes back at once.
  for (const bool listeners : {true, false}) {
    const std::unique_ptr<DIR, int (*)(DIR*)> open_files(opendir("/proc/self/fd"), closedir);
    if (!open_files) return;
    while (const dirent* entry = readdir(open_files.get())) {
      char* end = nullptr;
      const long fd = std::strtol(entry->d_name, &end, 10);
      if (*end != '\0' || end == entry->d_name) continue;  // "." and ".."
      if (!IsOurs(static_cast<int>(fd), ports, paths) || IsListening(static_cast<int>(fd)) != listeners) continue;
      shutdown(static_cast<int>(fd), listeners ? SHUT_RD : SHUT_WR);
    }
  }
}

}  // namespace layerd
