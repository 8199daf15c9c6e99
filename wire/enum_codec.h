// Enum values from outside: one table for each enum, unspecified and unknown values refused by name.
#ifndef LAYERD_WIRE_ENUM_CODEC_H_
#define LAYERD_WIRE_ENUM_CODEC_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd::wire {

// The value of ours that `table` pairs with `value`. `name` gives a value's name in the message, as protobuf's
// generated <Enum>_Name does.
template <typename Message, typename Ours, size_t kRows>
absl::StatusOr<Ours> DecodeEnum(std::string_view field, Message value, const std::pair<Message, Ours> (&table)[kRows],
                                const std::string& (*name)(Message)) {
  std::string expected;
  for (const auto& [message, ours] : table) {
    if (message == value) return ours;
    absl::StrAppend(&expected, expected.empty() ? "" : ", ", name(message));
  }
  if (static_cast<int>(value) == 0) {
    return MissingField(field, absl::StrCat("expected one of ", expected, ", got nothing"));
  }
  return InvalidField(field, "UNKNOWN_ENUM_VALUE",
                      absl::StrCat("expected one of ", expected, ", got the unknown value ", static_cast<int>(value)));
}

// The message's value for `value`; UNSPECIFIED where the table has none.
template <typename Message, typename Ours, size_t kRows>
Message EncodeEnum(Ours value, const std::pair<Message, Ours> (&table)[kRows]) {
  for (const auto& [message, ours] : table) {
    if (ours == value) return message;
  }
  return static_cast<Message>(0);
}

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_ENUM_CODEC_H_
