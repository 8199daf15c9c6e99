// More calls than a server can answer.
#ifndef LAYERD_BENCH_OVERLOAD_H_
#define LAYERD_BENCH_OVERLOAD_H_

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "bench/daemon.h"
#include "lib/base/tensor.h"
#include "lib/engine/layer_engine.h"

namespace layerd::bench {

// What became of the calls of an overload.
struct OverloadCounts {
  int64_t answered = 0;
  int64_t differing = 0;            // of those answered: the bits are not the expected ones
  int64_t late = 0;                 // accepted, and not answered within the deadline
  int64_t refused = 0;              // RESOURCE_EXHAUSTED
  double answered_p99_seconds = 0;  // from sending a call to its answer
  double refused_p99_seconds = 0;   // likewise to its refusal
  double peak_growth_mib = 0;       // the most that the daemon's memory grew by
  double seconds = 0;               // that it all took
};

// Sends one call again and again. Ends the program where a call has any other error. Threads: one at a time.
class Overload {
 public:
  // The call's input stays the same, and so must the answer, `expected`.
  Overload(const Daemon& daemon, FeedForwardCall call, Tensor expected);
  ~Overload();

  // As many callers as are told, each asking again when it is answered, until so many answers were given. Answers how many
  // there were a second.
  double Closed(int callers, int64_t answers);
  // Calls that come at random times, `rate` of them a second on average whatever becomes of them, each with a deadline,
  // until so many answers were given or so much time has passed, and nothing is under way.
  void Open(double rate, absl::Duration deadline, int64_t answers, absl::Duration time = absl::InfiniteDuration());

  // Of all Open()s.
  OverloadCounts counts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_OVERLOAD_H_
