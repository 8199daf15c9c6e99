// Errors as callers meet them: a code, a reason in UPPER_SNAKE_CASE, the path of the field they speak of, and a text.
//
// The details travel in the payload of an absl::Status, so that lib needs no protobuf; wire/status_codec turns them
// into google.rpc details. Texts have their fixed part first and the values last, and are bounded in length.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_BASE_ERRORS_H_
#define LAYERD_LIB_BASE_ERRORS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace layerd {

// What a Status carries beside code and text.
struct ErrorDetails {
  std::string reason;                     // "BYTE_COUNT_MISMATCH"; never empty on errors made here
  std::string field;                      // "input.shape"; empty when no field is meant
  std::string resource_type;              // "layer"; empty when no resource is meant
  std::string resource_name;              // "models/m/layers/l"
  std::optional<int64_t> retry_delay_ms;  // when to try again; −1: never, the same call cannot succeed
};

inline constexpr size_t kMaxErrorTextBytes = 1024;
inline constexpr size_t kMaxQuotedBytes = 128;

// `text` cut to `max_bytes` with "…" at the end where it was longer; never cut inside a UTF-8 sequence.
std::string Shortened(std::string_view text, size_t max_bytes = kMaxQuotedBytes);

// A field of the call has a value that cannot be used. INVALID_ARGUMENT.
absl::Status InvalidField(std::string_view field, std::string_view reason, std::string_view text);
// A field that must be given is missing. INVALID_ARGUMENT, reason MISSING.
absl::Status MissingField(std::string_view field, std::string_view text);
// Something the call needs exceeds what this server ever accepts; the text names limit and flag. RESOURCE_EXHAUSTED.
absl::Status TooLarge(std::string_view field, std::string_view reason, std::string_view text);
// No room now; try again after the delay. RESOURCE_EXHAUSTED, reason OVERLOADED.
absl::Status Overloaded(std::string_view text, int64_t retry_delay_ms);
// A queue is full: of `calls`, which take about `seconds` to get through; `flag` sets its limit. As Overloaded(), with a
// delay of 1 ms to 1 min.
absl::Status QueueFull(int64_t calls, double seconds, std::string_view flag);
// Memory for the call's work cannot be had now. As Overloaded().
absl::Status OutOfMemory();
// The deadline passed before the work began, or between its parts. DEADLINE_EXCEEDED.
absl::Status ExpiredWhileWaiting(std::string_view text);
// The caller went away before the work began, or between its parts. CANCELLED.
absl::Status CancelledWhileWaiting();
// The server is shutting down. UNAVAILABLE, reason DRAINING.
absl::Status Draining();
// A fault of ours. INTERNAL.
absl::Status InternalError(std::string_view text);

absl::Status WithDetails(absl::StatusCode code, std::string_view text, const ErrorDetails& details);
ErrorDetails DetailsOf(const absl::Status& status);

// The same error with `prefix` and a dot put before its field path, both in the details and at the head of the text
// where the text begins with the path. OK stays OK.
absl::Status Under(std::string_view prefix, const absl::Status& status);
// The same error with `to` in place of `from` where its field path is `from` or begins with it and a dot.
absl::Status Renamed(std::string_view from, std::string_view to, const absl::Status& status);

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_ERRORS_H_
