#include "bench/echo_server.h"

#include <grpc/grpc.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <cstdio>
#include <cstdlib>
#include <future>

#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "wire/http2_settings.h"

namespace layerd::bench {
namespace {

constexpr int64_t kUnlimited = int64_t{2047} << 20;

class BytesReactor final : public grpc::ServerGenericBidiReactor {
 public:
  BytesReactor() { StartRead(&bytes_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no message"));
    StartWriteAndFinish(&bytes_, grpc::WriteOptions(), grpc::Status::OK);
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer bytes_;
};

class BytesService final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* /*context*/) override {
    return new BytesReactor;
  }
};

class MessageService final : public v1::LayerService::CallbackService {
  grpc::ServerUnaryReactor* Normalize(grpc::CallbackServerContext* context, const v1::NormalizeRequest* request,
                                      v1::NormalizeResponse* response) override {
    *response->mutable_output() = request->input();
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

void Check(const grpc::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "an echo failed: %s\n", status.error_message().c_str());
  std::exit(1);
}

}  // namespace

class EchoServer::Services {
 public:
  BytesService bytes;
  MessageService messages;
};

EchoServer::EchoServer(const std::string& unix_path)
    : services_(std::make_unique<Services>()), unix_target_(absl::StrCat("unix:", unix_path)) {
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kHttp2WindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kHttp2FrameBytes);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.AddListeningPort(unix_target_, grpc::InsecureServerCredentials());
  builder.RegisterService(&services_->messages);
  builder.RegisterCallbackGenericService(&services_->bytes);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port == 0) {
    std::fprintf(stderr, "the echo server cannot listen\n");
    std::exit(1);
  }
  tcp_target_ = absl::StrCat("127.0.0.1:", port);
}

EchoServer::~EchoServer() { server_->Shutdown(); }

EchoClient::EchoClient(const std::string& target)
    : channel_(Connect(target, kUnlimited)), stub_(v1::LayerService::NewStub(channel_)) {}

grpc::ByteBuffer EchoClient::EchoBytes(const grpc::ByteBuffer& bytes) {
  grpc::ClientContext context;
  grpc::GenericStub stub(channel_);
  grpc::ByteBuffer answer;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/layerd.bench/Echo", grpc::StubOptions(), &bytes, &answer,
                 [&done](const grpc::Status& status) { done.set_value(status); });
  Check(done.get_future().get());
  return answer;
}

void EchoClient::EchoMessage(const v1::NormalizeRequest& request, v1::NormalizeResponse& response) {
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  stub_->async()->Normalize(&context, &request, &response,
                            [&done](const grpc::Status& status) { done.set_value(status); });
  Check(done.get_future().get());
}

}  // namespace layerd::bench
