// An answer from the bytes that gRPC received. Threads: pure functions.
#ifndef LAYERD_CLIENT_READ_ANSWER_H_
#define LAYERD_CLIENT_READ_ANSWER_H_

#include <grpcpp/support/byte_buffer.h>

#include <limits>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/remote_engine.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_codec.h"
#include "wire/normalize_codec.h"

namespace layerd {

// The Result that a Response is. INTERNAL, reason MALFORMED_ANSWER, for bytes that are none.
template <typename Response, typename Result>
absl::StatusOr<Result> ReadAnswer(grpc::ByteBuffer& bytes) {
  auto message = std::make_shared<Response>();
  const auto storage = wire::ReceiveMessage(bytes, std::numeric_limits<int64_t>::max(), message);
  if (!storage.ok()) return MalformedAnswer(absl::StrCat("is none: ", storage.status().message()));
  auto result = wire::DecodeResult(*message, *storage);
  if (!result.ok()) return MalformedAnswer(absl::StrCat("has ", result.status().message()));
  return result;
}

}  // namespace layerd

#endif  // LAYERD_CLIENT_READ_ANSWER_H_
