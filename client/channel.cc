#include "client/channel.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <limits>

#include "wire/http2_settings.h"

namespace layerd {
namespace {

// gRPC shuts itself down with its last channel, and may then wait 10 s for a poller that it started for a large write. One
// reference that is never given back keeps it up until the process ends.
void KeepGrpcUp() {
  static const bool kept = [] {
    grpc_init();
    return true;
  }();
  static_cast<void>(kept);
}

}  // namespace

std::shared_ptr<grpc::Channel> Connect(const std::string& target, int64_t max_answer_bytes) {
  KeepGrpcUp();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<int64_t>(max_answer_bytes, std::numeric_limits<int>::max())));
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kHttp2WindowBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kHttp2FrameBytes);
  // A proxy for the web that the environment names is not meant for tensors.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace layerd
