// One call of a method with one message each way, served on a thread of a pool.
#ifndef LAYERD_SERVER_WORKER_CALL_H_
#define LAYERD_SERVER_WORKER_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "lib/base/errors.h"
#include "lib/base/worker_pool.h"
#include "server/call_gate.h"
#include "server/call_loop.h"
#include "wire/message_codec.h"

namespace layerd {

// Makes the answer of the request, or says why not; each is bytes. Called once, on the pool's thread.
using ServeBytes = std::function<absl::Status(grpc::ByteBuffer& request, grpc::ByteBuffer& answer)>;

// The call deletes itself; gate and pool must outlive it. A request that is more than gRPC receives never comes here.
ServerCall* NewWorkerCall(std::unique_ptr<CallArrival> arrival, CallGate& gate, WorkerPool& pool, ServeBytes serve);

// Runs `work`, in which memory may not be had.
template <typename Work>
absl::Status Guarded(const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

// ServeBytes by `handle`, which makes a StatusOr of an answer of a Request of up to `max_bytes`.
template <typename Request, typename Handle>
ServeBytes ServeMessages(int64_t max_bytes, Handle handle) {
  return [max_bytes, handle = std::move(handle)](grpc::ByteBuffer& request, grpc::ByteBuffer& answer) {
    return Guarded([&] {
      Request message;
      if (auto parsed = wire::ParseMessage(request, max_bytes, message); !parsed.ok()) return parsed;
      const auto made = handle(message);
      return made.ok() ? wire::SerializeMessage(*made, answer) : made.status();
    });
  };
}

}  // namespace layerd

#endif  // LAYERD_SERVER_WORKER_CALL_H_
