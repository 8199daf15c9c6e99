// A gRPC server with layerd's services: LayerService, LayerRegistry, SharedMemoryRegistry, health (Check and Watch), reflection and channelz.
#ifndef LAYERD_SERVER_SERVER_H_
#define LAYERD_SERVER_SERVER_H_

#include <grpcpp/server.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/base/shared_regions.h"
#include "lib/engine/layer_engine.h"
#include "lib/resident/layer_registry.h"
#include "server/admission.h"
#include "server/call_loop.h"
#include "server/health_service.h"
#include "server/layer_registry_service.h"
#include "server/layer_service.h"
#include "server/listen_address.h"
#include "server/shared_memory_service.h"

namespace layerd {

struct ServerOptions {
  std::string grpc_listen = "127.0.0.1:50051";  // addresses, see ParseListenAddresses()
  AdmissionOptions admission;
  // What callers share with the server; must outlive it. Null: shared memory is off.
  SharedRegions* shared_memory = nullptr;
  LayerServiceOptions layer_service;
  LayerRegistryServiceOptions layer_registry;
};

// Threads: Start, Drain and the destructor from one thread; SetReady() from any.
class Server {
 public:
  // Serves as soon as it returns; health says NOT_SERVING until SetReady(). Engine and registry must outlive it.
  // INVALID_ARGUMENT for a bad address, FAILED_PRECONDITION for one that is taken.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options, LayerEngine& engine,
                                                       LayerRegistry& registry);
  ~Server();

  // Health says SERVING, until Drain().
  void SetReady();

  // The TCP addresses with the ports that were chosen, and unix sockets, as they were asked for.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // The TCP ports alone, in the same order.
  const std::vector<int>& ports() const { return ports_; }

  // Health says NOT_SERVING, new calls are refused with UNAVAILABLE, calls that were taken are finished; then
  // everything is closed. Calls that are not finished within `grace` are cancelled; returns how many.
  int64_t Drain(absl::Duration grace);

 private:
  Server(const ServerOptions& options, LayerEngine& engine, LayerRegistry& registry);

  void SetServingStatus(bool serving);

  std::mutex health_mutex_;
  bool draining_ = false;  // guarded by health_mutex_
  Admission admission_;
  LayerService layer_service_;
  LayerRegistryService layer_registry_;
  SharedMemoryService shared_memory_;
  HealthService health_;
  std::vector<std::unique_ptr<grpc::Service>> named_;
  CallLoop loop_;  // uses the services
  std::vector<UnixSocketLock> locks_;
  std::vector<std::string> addresses_;
  std::vector<int> ports_;
  std::vector<std::string> paths_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace layerd

#endif  // LAYERD_SERVER_SERVER_H_
