// Messages between their bytes, as gRPC hands them over, and protobuf.
//
// The service takes its requests as bytes, and reads them here, for three reasons: a large one is read on a thread of ours,
// not of gRPC's; a compressed one is unpacked only as far as the limit, where gRPC would unpack all of it first; and one
// that is malformed gets an error with details.
//
// Threads: pure functions.
#ifndef LAYERD_WIRE_MESSAGE_CODEC_H_
#define LAYERD_WIRE_MESSAGE_CODEC_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>

#include "absl/status/status.h"

namespace layerd::wire {

// Reads `message` from `bytes`, plain or gzip. RESOURCE_EXHAUSTED, never to be retried, for more than `max_bytes` (of
// the message, unpacked); INVALID_ARGUMENT, reason MALFORMED_MESSAGE, for bytes that are no such message. Memory taken is
// bounded by max_bytes.
absl::Status ParseMessage(grpc::ByteBuffer& bytes, int64_t max_bytes, google::protobuf::MessageLite& message);

// Replaces what is in `bytes`. INTERNAL for a message that protobuf cannot write: one over 2 GiB.
absl::Status SerializeMessage(const google::protobuf::MessageLite& message, grpc::ByteBuffer& bytes);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_MESSAGE_CODEC_H_
