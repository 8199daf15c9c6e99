// Errors between absl::Status with our details (lib/base/errors.h) and grpc::Status with google.rpc details.
//
// An error with a field becomes BadRequest; with a resource, ResourceInfo; with a delay, RetryInfo (a delay of −1,
// "never", has none); every one carries ErrorInfo {reason, domain "layerd"}. Threads: pure functions.
#ifndef LAYERD_WIRE_STATUS_CODEC_H_
#define LAYERD_WIRE_STATUS_CODEC_H_

#include <grpcpp/support/status.h>

#include <optional>
#include <string>

#include "absl/status/status.h"

namespace layerd::wire {

inline constexpr char kErrorDomain[] = "layerd";
// Trailer by which a server tells gRPC's own retries when to try again; −1: not at all.
inline constexpr char kPushbackTrailer[] = "grpc-retry-pushback-ms";

grpc::Status EncodeStatus(const absl::Status& status);
// The value of kPushbackTrailer that belongs to `status`, where it has one.
std::optional<std::string> PushbackOf(const absl::Status& status);

// The reverse. Details that are absent or cannot be read are left empty.
absl::Status DecodeStatus(const grpc::Status& status);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_STATUS_CODEC_H_
