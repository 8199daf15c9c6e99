// The deadline of a call.
#ifndef LAYERD_SERVER_DEADLINE_H_
#define LAYERD_SERVER_DEADLINE_H_

#include <grpc/support/time.h>
#include <grpcpp/server_context.h>

#include <cstdint>

#include "absl/time/time.h"

namespace layerd {

// gRPC's own std::chrono form of it overflows in the year 2262: callers who mean "never" name later ones. Threads: any.
inline absl::Time DeadlineOf(const grpc::ServerContextBase& context) {
  const gpr_timespec deadline = gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_REALTIME);
  constexpr int64_t kNever = int64_t{9'000'000'000};  // 2255
  if (deadline.tv_sec > kNever) return absl::InfiniteFuture();
  return absl::FromUnixSeconds(deadline.tv_sec) + absl::Nanoseconds(deadline.tv_nsec);
}

}  // namespace layerd

#endif  // LAYERD_SERVER_DEADLINE_H_
