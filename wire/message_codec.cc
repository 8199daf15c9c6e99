#include "wire/message_codec.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>
#include <grpcpp/support/slice.h>
#include <zlib.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd::wire {
namespace {

absl::Status MessageTooLarge(int64_t max_bytes, absl::string_view got) {
  return TooLarge("", "MESSAGE_TOO_LARGE",
                  absl::StrCat("expected a message of at most ", max_bytes, " bytes (--max_message_mib), got ", got));
}

absl::Status Malformed(const google::protobuf::MessageLite& message, absl::string_view got) {
  return InvalidField("", "MALFORMED_MESSAGE", absl::StrCat("expected a ", message.GetTypeName(), ", got ", got));
}

// gRPC does not tell whether a message came compressed. It need not: the first byte of gzip, 0x1F, is a tag of wire type
// 7 to protobuf, which does not exist, so no message begins with it.
bool IsGzip(const std::vector<grpc::Slice>& slices) {
  uint8_t head[2] = {};
  size_t got = 0;
  for (const grpc::Slice& slice : slices) {
    for (size_t i = 0; i < slice.size() && got < 2; ++i) head[got++] = slice.begin()[i];
    if (got == 2) break;
  }
  return got == 2 && head[0] == 0x1F && head[1] == 0x8B;
}

// What the gzip stream in `slices` holds, if that is at most `max_bytes`.
absl::Status Unpack(const std::vector<grpc::Slice>& slices, int64_t max_bytes,
                    const google::protobuf::MessageLite& message, std::string& unpacked) {
  z_stream stream{};
  constexpr int kGzipOnly = 16;
  if (inflateInit2(&stream, MAX_WBITS + kGzipOnly) != Z_OK) return InternalError("zlib could not be set up");
  const std::unique_ptr<z_stream, int (*)(z_stream*)> cleanup(&stream, inflateEnd);
  int result = Z_OK;
  std::vector<Bytef> chunk(65536);
  for (const grpc::Slice& slice : slices) {
    stream.next_in = const_cast<Bytef*>(slice.begin());
    stream.avail_in = static_cast<uInt>(slice.size());
    do {
      if (result == Z_STREAM_END && stream.avail_in > 0)
        return Malformed(message, "gzip with something behind its end");
      stream.next_out = chunk.data();
      stream.avail_out = static_cast<uInt>(chunk.size());
      result = inflate(&stream, Z_NO_FLUSH);
      if (result == Z_BUF_ERROR) result = Z_OK;  // all of this slice is used, and nothing was left to come out
      if (result != Z_OK && result != Z_STREAM_END) return Malformed(message, "damaged gzip");
      unpacked.append(reinterpret_cast<const char*>(chunk.data()), chunk.size() - stream.avail_out);
      if (static_cast<int64_t>(unpacked.size()) > max_bytes) {
        return MessageTooLarge(max_bytes, "more after unpacking it");
      }
    } while (stream.avail_in > 0 || (stream.avail_out == 0 && result != Z_STREAM_END));
  }
  return result == Z_STREAM_END ? absl::OkStatus() : Malformed(message, "gzip that ends in the middle");
}

}  // namespace

absl::Status ParseMessage(grpc::ByteBuffer& bytes, int64_t max_bytes, google::protobuf::MessageLite& message) {
  if (static_cast<int64_t>(bytes.Length()) > max_bytes) return MessageTooLarge(max_bytes, absl::StrCat(bytes.Length()));
  std::vector<grpc::Slice> slices;
  // A call without any message is one of an empty message, whose first missing field is then named.
  if (bytes.Valid() && !bytes.Dump(&slices).ok()) return InternalError("gRPC handed over no bytes");
  bool parsed = false;
  if (IsGzip(slices)) {
    std::string unpacked;
    if (auto status = Unpack(slices, max_bytes, message, unpacked); !status.ok()) return status;
    parsed = message.ParseFromString(unpacked);
  } else {
    grpc::ProtoBufferReader reader(&bytes);
    parsed = slices.empty() || message.ParseFromZeroCopyStream(&reader);
  }
  if (parsed) return absl::OkStatus();
  return Malformed(message, absl::StrCat(bytes.Length(), " bytes that are none: wrong field types, or an early end"));
}

absl::Status SerializeMessage(const google::protobuf::MessageLite& message, grpc::ByteBuffer& bytes) {
  const size_t size = message.ByteSizeLong();
  if (size > static_cast<size_t>(std::numeric_limits<int>::max())) {
    return InternalError(absl::StrCat("an answer of ", size, " bytes is no legal message"));
  }
  bytes.Clear();  // the writer ends the process where something is in it
  grpc::ProtoBufferWriter writer(&bytes, grpc::kProtoBufferWriterMaxBufferLength, static_cast<int>(size));
  if (!message.SerializeToZeroCopyStream(&writer)) return InternalError("the answer could not be written");
  return absl::OkStatus();
}

}  // namespace layerd::wire
