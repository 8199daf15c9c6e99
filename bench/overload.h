// More calls than a server can answer.
#ifndef LAYERD_BENCH_OVERLOAD_H_
#define LAYERD_BENCH_OVERLOAD_H_

#include <cstdint>
#include <memory>
#include <string>

#include "lib/base/tensor.h"
#include "lib/engine/layer_engine.h"

namespace layerd::bench {

// What became of the calls of an overload.
struct OverloadCounts {
  int64_t answered = 0;
  int64_t late = 0;                       // accepted, and not answered within the deadline
  int64_t refused = 0;                    // RESOURCE_EXHAUSTED
  double refused_p99_seconds = 0;         // from sending a call to its refusal
  double answered_p99_seconds = 0;        // likewise
  double peak_resident_growth_bytes = 0;  // of this process
};

// Sends one call again and again. Threads: one at a time.
class Overload {
 public:
  // The call's input stays the same, and so must the answer.
  Overload(const std::string& target, FeedForwardCall call);
  ~Overload();

  // As many callers as are told, each asking again when it is answered, until so many answers were given.
  void Closed(int callers, int64_t answers);
  // Calls that come at random times, `rate` of them a second on average whatever becomes of them, each with a deadline,
  // until so many answers were given and nothing is under way.
  void Open(double rate, absl::Duration deadline, int64_t answers);

  // Of all Open()s. Ends the program where a call had any other error.
  OverloadCounts counts() const;
  const Tensor& answer() const;  // the last one

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_OVERLOAD_H_
