// Lets calls in while the server takes them, and waits for them when it stops.
#ifndef LAYERD_SERVER_CALL_GATE_H_
#define LAYERD_SERVER_CALL_GATE_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace layerd {

// One for all services of a server. Threads: any.
class CallGate {
 public:
  // Counts in a call, or says why not: UNAVAILABLE.
  absl::Status Enter();
  // For each call that was counted in, once.
  void Leave();

  // From now on refuses calls with UNAVAILABLE.
  void Close();
  // The same, and waits until those that were taken are finished, at most until
  // `deadline`. Returns how many are not.
  int64_t Drain(absl::Time deadline);

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t in_flight_ = 0;  // guarded by mutex_
  bool draining_ = false;  // guarded by mutex_
};

}  // namespace layerd

#endif  // LAYERD_SERVER_CALL_GATE_H_
