// Servers for the tests of streams: a real one in this process, and one that answers whatever a test wants.
#ifndef LAYERD_TESTS_CLIENT_STREAM_SERVERS_H_
#define LAYERD_TESTS_CLIENT_STREAM_SERVERS_H_

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "layerd/v1/layer_service.grpc.pb.h"
#include "lib/engine/cpu_engine.h"
#include "lib/resident/layer_library.h"
#include "server/server.h"

namespace layerd {

// The daemon's server above an engine without layers of its own.
class RealServer {
 public:
  explicit RealServer(int64_t max_message_bytes = int64_t{64} << 20)
      : engine_({.threads = 2, .max_answer_bytes = max_message_bytes}) {
    ServerOptions options;
    options.grpc_listen = "127.0.0.1:0";
    options.layer_service.max_message_bytes = max_message_bytes;
    auto server = Server::Start(options, engine_, registry_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::string target() const { return server_->addresses().front(); }

 private:
  CpuEngine engine_;
  LayerLibrary library_{{}, {}};
  LayerRegistry registry_{library_, nullptr, nullptr};
  std::unique_ptr<Server> server_;
};

// Streams, and nothing else.
class FakeServer : public v1::LayerService::Service {
 public:
  using NormalizeRpc = grpc::ServerReaderWriter<v1::NormalizeResponse, v1::StreamNormalizeRequest>;
  using Behaviour = std::function<grpc::Status(grpc::ServerContext&, NormalizeRpc&)>;

  explicit FakeServer(Behaviour behaviour) : behaviour_(std::move(behaviour)) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    target_ = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeServer() override { server_->Shutdown(); }

  const std::string& target() const { return target_; }
  int streams() const { return streams_; }

  grpc::Status StreamNormalize(grpc::ServerContext* context, NormalizeRpc* rpc) override {
    ++streams_;
    return behaviour_(*context, *rpc);
  }

 private:
  const Behaviour behaviour_;
  std::atomic<int> streams_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::string target_;
};

// The input as output: an answer that fits.
inline v1::NormalizeResponse Echo(const v1::StreamNormalizeRequest& request) {
  v1::NormalizeResponse response;
  *response.mutable_output() = request.has_call() ? request.call().input() : request.input();
  return response;
}

// Answers each message as `answer` changes Echo() of it, given its number in the stream.
inline FakeServer::Behaviour Answering(std::function<void(int, v1::NormalizeResponse&)> change) {
  return [change = std::move(change)](grpc::ServerContext&, FakeServer::NormalizeRpc& rpc) {
    v1::StreamNormalizeRequest request;
    for (int i = 0; rpc.Read(&request); ++i) {
      v1::NormalizeResponse response = Echo(request);
      change(i, response);
      rpc.Write(response);
    }
    return grpc::Status::OK;
  };
}

// Waits until the caller has gone away: one that never answers.
inline grpc::Status WaitForTheEnd(grpc::ServerContext& context, FakeServer::NormalizeRpc& rpc) {
  v1::StreamNormalizeRequest request;
  while (!context.IsCancelled()) {
    if (!rpc.Read(&request)) std::this_thread::yield();
  }
  return grpc::Status::CANCELLED;
}

}  // namespace layerd

#endif  // LAYERD_TESTS_CLIENT_STREAM_SERVERS_H_
