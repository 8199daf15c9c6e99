#include "lib/base/errors.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace layerd {
namespace {

// Reason, field, resource type, resource name and delay, joined by NUL, which none of them contains.
constexpr char kPayloadUrl[] = "layerd/error-details";

std::string WithoutNul(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c == '\0') c = ' ';
  }
  return result;
}

absl::Status FieldStatus(absl::StatusCode code, std::string_view field, std::string_view reason,
                         std::string_view text) {
  ErrorDetails details;
  details.reason = std::string(reason);
  details.field = std::string(field);
  const std::string full =
      field.empty() ? std::string(text) : absl::StrCat(std::string(field), ": ", std::string(text));
  return WithDetails(code, full, details);
}

}  // namespace

std::string Shortened(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) --end;
  return std::string(text.substr(0, end)) + "…";
}

absl::Status WithDetails(absl::StatusCode code, std::string_view text, const ErrorDetails& details) {
  absl::Status status(code, Shortened(text, kMaxErrorTextBytes));
  status.SetPayload(kPayloadUrl, absl::Cord(absl::StrCat(
                                     WithoutNul(details.reason), std::string(1, '\0'), WithoutNul(details.field),
                                     std::string(1, '\0'), WithoutNul(details.resource_type), std::string(1, '\0'),
                                     WithoutNul(details.resource_name), std::string(1, '\0'),
                                     details.retry_delay_ms ? absl::StrCat(*details.retry_delay_ms) : std::string())));
  return status;
}

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  const auto payload = status.GetPayload(kPayloadUrl);
  if (!payload) return details;
  const std::vector<std::string> parts = absl::StrSplit(std::string(*payload), '\0');
  if (parts.size() != 5) return details;
  details.reason = parts[0];
  details.field = parts[1];
  details.resource_type = parts[2];
  details.resource_name = parts[3];
  int64_t delay;
  if (absl::SimpleAtoi(parts[4], &delay)) details.retry_delay_ms = delay;
  return details;
}

absl::Status InvalidField(std::string_view field, std::string_view reason, std::string_view text) {
  return FieldStatus(absl::StatusCode::kInvalidArgument, field, reason, text);
}

absl::Status MissingField(std::string_view field, std::string_view text) {
  return InvalidField(field, "MISSING", text);
}

absl::Status TooLarge(std::string_view field, std::string_view reason, std::string_view text) {
  ErrorDetails details;
  details.reason = std::string(reason);
  details.field = std::string(field);
  details.retry_delay_ms = -1;
  const std::string full =
      field.empty() ? std::string(text) : absl::StrCat(std::string(field), ": ", std::string(text));
  return WithDetails(absl::StatusCode::kResourceExhausted, full, details);
}

absl::Status Overloaded(std::string_view text, int64_t retry_delay_ms) {
  ErrorDetails details;
  details.reason = "OVERLOADED";
  details.retry_delay_ms = retry_delay_ms;
  return WithDetails(absl::StatusCode::kResourceExhausted, text, details);
}

absl::Status QueueFull(int64_t calls, double seconds, std::string_view flag) {
  const int64_t delay_ms = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(seconds * 1000)), 1, 60000);
  return Overloaded(absl::StrCat("busy: ", calls, " calls wait already (", std::string(flag), ")"), delay_ms);
}

absl::Status OutOfMemory() { return Overloaded("no memory for the call's work", 1000); }

absl::Status ExpiredWhileWaiting(std::string_view text) {
  return FieldStatus(absl::StatusCode::kDeadlineExceeded, "", "EXPIRED_WHILE_WAITING", text);
}

absl::Status CancelledWhileWaiting() {
  return FieldStatus(absl::StatusCode::kCancelled, "", "CANCELLED_WHILE_WAITING",
                     "the call was cancelled before its work was done");
}

absl::Status Draining() {
  return FieldStatus(absl::StatusCode::kUnavailable, "", "DRAINING",
                     "the server is shutting down; send the call to another one");
}

absl::Status InternalError(std::string_view text) {
  return FieldStatus(absl::StatusCode::kInternal, "", "INTERNAL", text);
}

absl::Status Under(std::string_view prefix, const absl::Status& status) {
  if (status.ok() || prefix.empty()) return status;
  ErrorDetails details = DetailsOf(status);
  std::string text(status.message());
  const bool begins_with_path = !details.field.empty() && text.rfind(details.field + ": ", 0) == 0;
  text = absl::StrCat(std::string(prefix), begins_with_path ? "." : ": ", text);
  details.field = details.field.empty() ? std::string(prefix) : absl::StrCat(std::string(prefix), ".", details.field);
  return WithDetails(status.code(), text, details);
}

absl::Status Renamed(std::string_view from, std::string_view to, const absl::Status& status) {
  ErrorDetails details = DetailsOf(status);
  const std::string old = details.field;
  const bool begins = old.rfind(from, 0) == 0 && (old.size() == from.size() || old[from.size()] == '.');
  if (status.ok() || !begins) return status;
  details.field = absl::StrCat(std::string(to), old.substr(from.size()));
  std::string text(status.message());
  if (text.rfind(old + ": ", 0) == 0) text.replace(0, old.size(), details.field);
  return WithDetails(status.code(), text, details);
}

}  // namespace layerd
