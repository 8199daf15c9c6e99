// What the calls of a server share before and after their work: the gate, memory for messages, and the watch over callers.
#ifndef LAYERD_SERVER_ADMISSION_H_
#define LAYERD_SERVER_ADMISSION_H_

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "lib/base/byte_budget.h"
#include "lib/engine/layer_engine.h"
#include "server/call_gate.h"
#include "server/stall_watch.h"

namespace layerd {

struct AdmissionOptions {
  int64_t message_bytes = int64_t{1} << 30;  // of requests that are received, wait or are computed
  int queue_calls = 256;                     // calls that may wait until memory for their request is free
  absl::Duration stall = absl::Seconds(60);  // see StallWatch
  // Of answers, as the engine has it, or null.
  std::shared_ptr<const ByteBudget> answers;
};

// A request's size is not known before it is received, so that a call first gets memory for the largest, and gives back
// what it did not need. Threads: any.
struct Admission {
  explicit Admission(const AdmissionOptions& options)
      : messages(options.message_bytes, options.queue_calls, "--message_memory_mib"),
        stall_watch(options.stall, [this, answers = options.answers] {
          return messages.IsShort() || (answers != nullptr && answers->IsShort());
        }) {}

  CallGate gate;
  ByteBudget messages;
  StallWatch stall_watch;
};

}  // namespace layerd

#endif  // LAYERD_SERVER_ADMISSION_H_
