// Connections to a layerd, for the classes of the client.
#ifndef LAYERD_CLIENT_CHANNEL_H_
#define LAYERD_CLIENT_CHANNEL_H_

#include <grpcpp/channel.h>

#include <cstdint>
#include <memory>
#include <string>

namespace layerd {

// A channel to `target` (HOST:PORT, or unix:PATH) that takes answers of at most `max_answer_bytes`. It connects when it is
// first used; channels with the same arguments share one connection. Threads: any.
std::shared_ptr<grpc::Channel> Connect(const std::string& target, int64_t max_answer_bytes);

}  // namespace layerd

#endif  // LAYERD_CLIENT_CHANNEL_H_
