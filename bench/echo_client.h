// What the service is measured against: calls of service_echo, which sends back what it gets, as bytes and as messages.
#ifndef LAYERD_BENCH_ECHO_CLIENT_H_
#define LAYERD_BENCH_ECHO_CLIENT_H_

#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <string>

#include "layerd/v1/layer_service.grpc.pb.h"

namespace layerd::bench {

// With the settings of layerd's own client. Threads: any.
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

#endif  // LAYERD_BENCH_ECHO_CLIENT_H_
