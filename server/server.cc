#include "server/server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/method_handler.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "layerd/v1/layer_registry.grpc.pb.h"
#include "layerd/v1/layer_service.grpc.pb.h"
#include "layerd/v1/shared_memory.grpc.pb.h"
#include "lib/base/errors.h"
#include "server/half_close.h"
#include "server/log.h"
#include "wire/http2_settings.h"

namespace layerd {
namespace {

// gRPC's own messages go into our log, at its lowest level: what matters of them comes to us as a status too.
void ForwardGrpcLog(gpr_log_func_args* args) {
  Log(LogLevel::kDebug, "grpc", {{"message", args->message}, {"file", args->file}, {"line", absl::StrCat(args->line)}});
}

// protobuf's: any caller can bring forth as many as it likes.
void ForwardProtobufLog(google::protobuf::LogLevel /*level*/, const char* file, int line, const std::string& text) {
  Log(LogLevel::kDebug, "protobuf", {{"message", text}, {"file", file}, {"line", absl::StrCat(line)}});
}

// A service by its name alone, for reflection: gRPC knows of it by a method, and all of its own are the loop's. This one is
// UNIMPLEMENTED as any that there is not.
class NamedService final : public grpc::Service {
 public:
  explicit NamedService(absl::string_view name) : method_(absl::StrCat("/", name, "/-")) {
    AddMethod(new grpc::internal::RpcServiceMethod(method_.c_str(), grpc::internal::RpcMethod::NORMAL_RPC,
                                                   new grpc::internal::UnknownMethodHandler("no such method")));
  }

 private:
  const std::string method_;
};

constexpr const char* kServices[] = {v1::LayerService::service_full_name(), v1::LayerRegistry::service_full_name(),
                                     v1::SharedMemoryRegistry::service_full_name()};

void InstallPluginsOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(ForwardGrpcLog);
    google::protobuf::SetLogHandler(ForwardProtobufLog);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::channelz::experimental::InitChannelzService();
  });
}

}  // namespace

Server::Server(const ServerOptions& options, LayerEngine& engine, LayerRegistry& registry)
    : admission_(options.admission),
      layer_service_(engine, admission_, options.shared_memory, options.layer_service),
      layer_registry_(registry, admission_.gate, options.layer_registry),
      shared_memory_(options.shared_memory, admission_.gate) {
  for (const char* service : kServices) named_.push_back(std::make_unique<NamedService>(service));
  named_.push_back(std::make_unique<NamedService>(grpc::health::v1::Health::service_full_name()));
  layer_service_.AddTo(loop_);
  layer_registry_.AddTo(loop_);
  shared_memory_.AddTo(loop_);
  health_.AddTo(loop_);
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, LayerEngine& engine,
                                                      LayerRegistry& registry) {
  const auto addresses = ParseListenAddresses(options.grpc_listen);
  if (!addresses.ok()) return addresses.status();
  InstallPluginsOnce();
  std::unique_ptr<Server> server(new Server(options, engine, registry));

  grpc::ServerBuilder builder;
  // Each call that is open takes some memory, whatever is said of it.
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1024);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kHttp2WindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kHttp2FrameBytes);
  // Callers may ping once a second to see that a long call is alive; by default gRPC takes one in 5 minutes. And a
  // caller whose machine has gone without a word is noticed.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  // A second server on the same port must fail, not share it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // gRPC refuses a message over this limit with a bare status that names no flag. Up to twice our own limit the message
  // reaches the service, which refuses it by name.
  builder.SetMaxReceiveMessageSize(static_cast<int>(
      std::min<int64_t>(2 * options.layer_service.max_message_bytes, std::numeric_limits<int>::max())));
  // gRPC would unpack a compressed message whole before it looks at its size. The service unpacks gzip itself, as far as
  // the limit; other compression is refused.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetMaxSendMessageSize(-1);
  // What calls may send before they have memory, a window each, has this bound, and so have callers who send more than they
  // may; beyond it gRPC ends calls with a bare status.
  constexpr int64_t kUnreadBytes = int64_t{128} << 20;
  grpc::ResourceQuota quota("layerd");
  quota.Resize(static_cast<size_t>(options.admission.message_bytes + kUnreadBytes));
  builder.SetResourceQuota(quota);
  for (const auto& named : server->named_) builder.RegisterService(named.get());
  server->loop_.AddTo(builder);
  std::vector<int> ports(addresses->size(), 0);
  for (size_t i = 0; i < addresses->size(); ++i) {
    const ListenAddress& address = (*addresses)[i];
    if (address.is_unix) {
      auto lock = UnixSocketLock::Acquire(address.path);
      if (!lock.ok()) return lock.status();
      server->locks_.push_back(*std::move(lock));
    }
    builder.AddListeningPort(address.text, grpc::InsecureServerCredentials(), &ports[i]);
  }
  server->SetServingStatus(false);
  server->server_ = builder.BuildAndStart();
  for (size_t i = 0; i < addresses->size(); ++i) {
    const ListenAddress& address = (*addresses)[i];
    if (server->server_ == nullptr || ports[i] == 0) {
      // gRPC says which address it could not bind only in its own log: name the first without a port, or all.
      const bool this_one = ports[i] == 0;
      if (!this_one && i + 1 < addresses->size()) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("cannot listen on ", this_one ? address.text : options.grpc_listen,
                       ": the address is in use, not one of this machine's, or not permitted"));
    }
    if (address.is_unix) {
      server->addresses_.push_back(address.text);
      server->paths_.push_back(address.path);
    } else {
      server->addresses_.push_back(absl::StrCat(address.text.substr(0, address.text.rfind(':')), ":", ports[i]));
      server->ports_.push_back(ports[i]);
    }
  }
  if (auto status = server->loop_.Start(); !status.ok()) return status;
  return server;
}

void Server::SetServingStatus(bool serving) {
  health_.SetServing("", serving);
  for (const char* service : kServices) health_.SetServing(service, serving);
}

void Server::SetReady() {
  std::lock_guard<std::mutex> lock(health_mutex_);
  if (!draining_) SetServingStatus(true);
}

int64_t Server::Drain(absl::Duration grace) {
  {
    std::lock_guard<std::mutex> lock(health_mutex_);
    draining_ = true;
    SetServingStatus(false);
  }
  admission_.gate.Close();
  admission_.messages.Close(Draining());
  const int64_t unfinished = admission_.gate.Drain(absl::Now() + grace);
  constexpr absl::Duration kForWatchesToBeTold = absl::Milliseconds(250);
  health_.AwaitTold(kForWatchesToBeTold);
  HalfCloseConnections(ports_, paths_);
  // What is open after that is cancelled: calls past the grace, and connections whose callers do not close them.
  constexpr absl::Duration kForCallersToClose = absl::Milliseconds(500);
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kForCallersToClose));
  loop_.Stop();
  return unfinished;
}

Server::~Server() {
  if (!server_) return;
  server_->Shutdown(absl::ToChronoTime(absl::Now()));
  loop_.Stop();
}

}  // namespace layerd
