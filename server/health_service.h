// gRPC's standard health service, grpc.health.v1.Health: who asks, and who watches, hears whether calls are taken.
#ifndef LAYERD_SERVER_HEALTH_SERVICE_H_
#define LAYERD_SERVER_HEALTH_SERVICE_H_

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "absl/time/time.h"
#include "grpc/health/v1/health.pb.h"
#include "server/call_loop.h"

namespace layerd {

// gRPC has one of its own, but for its callback API, whose threads call_loop.h does without. Threads: any.
class HealthService {
 public:
  // Serves the methods of the service until the loop is stopped.
  void AddTo(CallLoop& loop);

  // Of a service by its full name; empty: of the whole server.
  void SetServing(const std::string& service, bool serving);

  // Waits, for so long at most, until all who watch have been told of it.
  void AwaitTold(absl::Duration limit);

 private:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;
  class Check;
  class Watch;

  std::mutex mutex_;
  std::map<std::string, Status> statuses_;  // guarded by mutex_
  std::set<Watch*> watches_;                // guarded by mutex_
  int telling_ = 0;                         // guarded by mutex_; writes under way
  std::condition_variable told_;
};

}  // namespace layerd

#endif  // LAYERD_SERVER_HEALTH_SERVICE_H_
