// Lets calls in while the server takes them, bounds the bytes of those under way, and waits for them when it stops.
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
  // Calls whose messages would together exceed `max_bytes` are refused, unless there is no other.
  explicit CallGate(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Counts in a call whose message has so many bytes, or says why not: RESOURCE_EXHAUSTED with a delay, UNAVAILABLE.
  absl::Status Enter(int64_t bytes);
  // For each call that was counted in, once, with the same number.
  void Leave(int64_t bytes);

  // From now on refuses calls with UNAVAILABLE; waits until those that were taken are finished, at most until
  // `deadline`. Returns how many are not.
  int64_t Drain(absl::Time deadline);

 private:
  const int64_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t in_flight_ = 0;        // guarded by mutex_
  int64_t bytes_in_flight_ = 0;  // guarded by mutex_
  bool draining_ = false;        // guarded by mutex_
};

}  // namespace layerd

#endif  // LAYERD_SERVER_CALL_GATE_H_
