#include "server/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"

namespace layerd {
namespace {

void InstallPluginsOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::channelz::experimental::InitChannelzService();
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, LayerEngine& engine) {
  const auto addresses = ParseListenAddresses(options.grpc_listen);
  if (!addresses.ok()) return addresses.status();
  InstallPluginsOnce();
  std::unique_ptr<Server> server(new Server(engine, options.max_message_bytes));

  grpc::ServerBuilder builder;
  // A second server on the same port must fail, not share it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // gRPC refuses a message over this limit with a bare status that names no flag. Up to twice our own limit the message
  // reaches the service, which refuses it by name.
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<int64_t>(2 * options.max_message_bytes, std::numeric_limits<int>::max())));
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(&server->service_);
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
  server->server_ = builder.BuildAndStart();
  for (size_t i = 0; i < addresses->size(); ++i) {
    const ListenAddress& address = (*addresses)[i];
    if (server->server_ == nullptr || ports[i] == 0) {
      // gRPC says which address it could not bind only in its own log: name the first without a port, or all.
      const bool this_one = ports[i] == 0;
      if (!this_one && i + 1 < addresses->size()) continue;
      return absl::FailedPreconditionError(absl::StrCat("cannot listen on ",
                                                        this_one ? address.text : options.grpc_listen,
                                                        ": the address is in use, or not one of this machine's"));
    }
    if (address.is_unix) {
      server->addresses_.push_back(address.text);
    } else {
      server->addresses_.push_back(absl::StrCat(address.text.substr(0, address.text.rfind(':')), ":", ports[i]));
      server->ports_.push_back(ports[i]);
    }
  }
  server->server_->GetHealthCheckService()->SetServingStatus(v1::LayerService::service_full_name(), true);
  return server;
}

int64_t Server::Drain(absl::Duration grace) {
  server_->GetHealthCheckService()->SetServingStatus(false);
  const int64_t unfinished = service_.Drain(absl::Now() + grace);
  // Whatever is still open now is cancelled: health watches, which never end by themselves, and calls past the grace.
  server_->Shutdown(absl::ToChronoTime(absl::Now()));
  server_->Wait();
  return unfinished;
}

Server::~Server() {
  if (server_) server_->Shutdown(absl::ToChronoTime(absl::Now()));
}

}  // namespace layerd
