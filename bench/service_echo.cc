// What service_bench measures calls against, in a process of its own as the daemon is: a server that sends back what it
// gets, as bytes and as messages, with the HTTP/2 settings of layerd's own.
//
//   service_echo SOCKET [FOLDER]...
//
// Listens on loopback and on the unix socket SOCKET, prints a line "grpc ADDRESS" for each, and serves until its standard
// input ends. Then it removes the folders: so they are gone even where service_bench was killed.
#include <grpc/grpc.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "bench/fail.h"
#include "layerd/v1/layer_service.grpc.pb.h"
#include "wire/http2_settings.h"

namespace layerd::bench {
namespace {

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

[[noreturn]] void Serve(const std::string& socket, const std::vector<std::string>& folders) {
  BytesService bytes;
  MessageService messages;
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kHttp2WindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kHttp2FrameBytes);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  const std::string unix_address = absl::StrCat("unix:", socket);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.AddListeningPort(unix_address, grpc::InsecureServerCredentials());
  builder.RegisterService(&messages);
  builder.RegisterCallbackGenericService(&bytes);
  const auto server = builder.BuildAndStart();
  if (server == nullptr || port == 0) Fail("cannot listen");
  std::printf("grpc 127.0.0.1:%d\ngrpc %s\n", port, unix_address.c_str());
  std::fflush(stdout);
  for (char c; read(STDIN_FILENO, &c, 1) > 0;) continue;
  for (const std::string& folder : folders) {
    std::error_code error;
    std::filesystem::remove_all(folder, error);
  }
  std::_Exit(0);  // nobody calls any more, and gRPC's own shutdown may wait 10 s
}

}  // namespace
}  // namespace layerd::bench

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "service_echo SOCKET [FOLDER]...\n");
    return 2;
  }
  // Its input ends with the process that started it, too, and then there are folders to remove.
  prctl(PR_SET_PDEATHSIG, 0);
  // As in layerd: Debian's Abseil looks for deadlocks at every lock otherwise.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  layerd::bench::Serve(argv[1], {argv + 2, argv + argc});
}
