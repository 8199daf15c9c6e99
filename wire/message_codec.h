// Messages between their bytes, as gRPC hands them over, and protobuf.
//
// The service takes its requests as bytes, and reads them here, for three reasons: a large one is read on a thread of ours,
// not of gRPC's; a compressed one is unpacked only as far as the limit, where gRPC would unpack all of it first; and one
// that is malformed gets an error with details.
//
// Threads: pure functions.
#ifndef LAYERD_WIRE_MESSAGE_CODEC_H_
#define LAYERD_WIRE_MESSAGE_CODEC_H_

#include <google/protobuf/message.h>
#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "wire/message_storage.h"

namespace layerd::wire {

// Reads `message` from `bytes`, plain or gzip. RESOURCE_EXHAUSTED, never to be retried, for more than `max_bytes` (of
// the message, unpacked); INVALID_ARGUMENT, reason MALFORMED_MESSAGE, for bytes that are no such message. Memory taken is
// bounded by max_bytes.
absl::Status ParseMessage(grpc::ByteBuffer& bytes, int64_t max_bytes, google::protobuf::MessageLite& message);

// Messages of no more bytes are copied in less time than it takes to leave their tensors where they are.
inline constexpr size_t kCopiedMessageBytes = 65536;

// The same of a message with tensors: the elements of large ones stay where they are in `bytes`, or in what was unpacked,
// and are empty in `message`. The result keeps all of it alive; `bytes` may be cleared.
absl::StatusOr<ReceivedStorage> ReceiveMessage(grpc::ByteBuffer& bytes, int64_t max_bytes,
                                               std::shared_ptr<google::protobuf::Message> message);

// The same where it is a matter of microseconds, whatever the size; nothing where it takes a thread of ours, for gzip or
// much else than tensors' data to copy, or there is an error to tell.
std::optional<ReceivedStorage> ReceiveAtOnce(const grpc::ByteBuffer& bytes, int64_t max_bytes,
                                             std::shared_ptr<google::protobuf::Message> message);

// Replaces what is in `bytes`. INTERNAL for a message that protobuf cannot write: one over 2 GiB.
absl::Status SerializeMessage(const google::protobuf::MessageLite& message, grpc::ByteBuffer& bytes);

// The same of a message with tensors, those in `storage` put in without a copy: `bytes` share their memory.
absl::Status SendMessage(const google::protobuf::Message& message, const SentStorage& storage, grpc::ByteBuffer& bytes);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_MESSAGE_CODEC_H_
