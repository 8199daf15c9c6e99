#include "bench/echo_client.h"

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <cstdint>
#include <future>

#include "absl/strings/str_cat.h"
#include "bench/fail.h"
#include "client/channel.h"

namespace layerd::bench {
namespace {

constexpr int64_t kUnlimited = int64_t{2047} << 20;

void Check(const grpc::Status& status) {
  if (!status.ok()) Fail(absl::StrCat("an echo failed: ", status.error_message()));
}

}  // namespace

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
