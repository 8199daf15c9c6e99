// What the service is measured against: servers that send back what they get, as bytes and as messages.
#ifndef LAYERD_BENCH_ECHO_SERVER_H_
#define LAYERD_BENCH_ECHO_SERVER_H_

#include <grpcpp/channel.h>
#include <grpcpp/server.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <string>

#include "layerd/v1/layer_service.grpc.pb.h"

namespace layerd::bench {

// Serves with the HTTP/2 settings of layerd's own server, on two addresses. Threads: any.
class EchoServer {
 public:
  // Ends the program with a message where it cannot listen.
  explicit EchoServer(const std::string& unix_path);
  ~EchoServer();

  const std::string& tcp_target() const { return tcp_target_; }
  const std::string& unix_target() const { return unix_target_; }

 private:
  class Services;
  std::unique_ptr<Services> services_;
  std::unique_ptr<grpc::Server> server_;
  std::string tcp_target_;
  std::string unix_target_;
};

// Calls it, with the settings of layerd's own client. Threads: one at a time.
class EchoClient {
 public:
  explicit EchoClient(const std::string& target);

  // Sends `bytes` and waits for them to come back. Both end the program where a call fails.
  grpc::ByteBuffer EchoBytes(const grpc::ByteBuffer& bytes);
  // The same of Normalize as an ordinary service of protobuf's has it: the answer's output is the request's input.
  void EchoMessage(const v1::NormalizeRequest& request, v1::NormalizeResponse& response);

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::LayerService::Stub> stub_;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_ECHO_SERVER_H_
