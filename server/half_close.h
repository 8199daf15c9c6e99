// Ends this process's connections so that their callers lose nothing.
#ifndef LAYERD_SERVER_HALF_CLOSE_H_
#define LAYERD_SERVER_HALF_CLOSE_H_

#include <string>
#include <vector>

namespace layerd {

// For the sockets that belong to `ports` (TCP) and `paths` (unix): stops listening, then ends the sending side of every
// connection behind what was already sent. A caller reads all answers it was sent, then sees the connection close, and
// fails whatever it had just begun to send with UNAVAILABLE, which may be retried.
//
// grpc::Server::Shutdown() alone answers calls that arrive at that moment with CANCELLED, which may not.
// Threads: any; the sockets are gRPC's, which notices and closes them.
void HalfCloseConnections(const std::vector<int>& ports, const std::vector<std::string>& paths);

}  // namespace layerd

#endif  // LAYERD_SERVER_HALF_CLOSE_H_
