#include "wire/message_codec.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>
#include <grpcpp/support/slice.h>
#include <zlib.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "wire/tensor_fields.h"

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
bool IsGzip(const uint8_t (&head)[2]) { return head[0] == 0x1F && head[1] == 0x8B; }

bool IsGzip(const std::vector<grpc::Slice>& slices) {
  uint8_t head[2] = {};
  size_t got = 0;
  for (const grpc::Slice& slice : slices) {
    for (size_t i = 0; i < slice.size() && got < 2; ++i) head[got++] = slice.begin()[i];
    if (got == 2) break;
  }
  return IsGzip(head);
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

// The bytes of a message: slices of gRPC's, or what gzip made of them.
struct Plain {
  std::vector<grpc::Slice> slices;
  bool is_unpacked = false;
  std::string unpacked;

  Pieces pieces() const {
    Pieces all;
    if (is_unpacked) {
      all.emplace_back(reinterpret_cast<const std::byte*>(unpacked.data()), unpacked.size());
    } else {
      for (const grpc::Slice& slice : slices) {
        all.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
      }
    }
    return all;
  }
};

absl::Status Open(const grpc::ByteBuffer& bytes, int64_t max_bytes, const google::protobuf::MessageLite& message,
                  Plain& plain) {
  if (static_cast<int64_t>(bytes.Length()) > max_bytes) return MessageTooLarge(max_bytes, absl::StrCat(bytes.Length()));
  // A call without any message is one of an empty message, whose first missing field is then named.
  if (bytes.Valid() && !bytes.Dump(&plain.slices).ok()) return InternalError("gRPC handed over no bytes");
  plain.is_unpacked = IsGzip(plain.slices);
  return plain.is_unpacked ? Unpack(plain.slices, max_bytes, message, plain.unpacked) : absl::OkStatus();
}

absl::Status Parse(const Plain& plain, grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message) {
  bool parsed = false;
  if (plain.is_unpacked) {
    parsed = message.ParseFromString(plain.unpacked);
  } else {
    grpc::ProtoBufferReader reader(&bytes);
    parsed = plain.slices.empty() || message.ParseFromZeroCopyStream(&reader);
  }
  if (parsed) return absl::OkStatus();
  return Malformed(message, absl::StrCat(bytes.Length(), " bytes that are none: wrong field types, or an early end"));
}

absl::Status CheckLegal(size_t size) {
  if (size <= static_cast<size_t>(std::numeric_limits<int>::max())) return absl::OkStatus();
  return InternalError(absl::StrCat("a message of ", size, " bytes is none: the limit is 2 GiB"));
}

// `tensor`, whose elements are `pieces` of `plain`, and what keeps them alive: where they came in slices, no more than
// those.
ReceivedStorage::Apart Own(const v1::Tensor& tensor, const Pieces& pieces, const std::shared_ptr<const Plain>& plain) {
  if (plain->is_unpacked) return {&tensor, pieces, plain};
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  slices->reserve(pieces.size());  // a short slice has its bytes in itself, and so must stay where it is
  Pieces owned;
  auto slice = plain->slices.begin();  // both are in the same order
  for (const auto& piece : pieces) {
    const auto* at = reinterpret_cast<const uint8_t*>(piece.data());
    while (std::less<>()(at, slice->begin()) || !std::less<>()(at, slice->end())) ++slice;
    slices->push_back(*slice);
    owned.emplace_back(reinterpret_cast<const std::byte*>(slices->back().begin() + (at - slice->begin())),
                       piece.size());
  }
  return {&tensor, std::move(owned), std::move(slices)};
}

// `message` without the elements of large tensors; nothing where protobuf should look itself.
std::optional<ReceivedStorage> Apart(const std::shared_ptr<const Plain>& plain,
                                     std::shared_ptr<google::protobuf::Message> message) {
  const auto separated = Separate(*message->GetDescriptor(), plain->pieces());
  if (!separated || !message->ParseFromString(separated->rest)) return std::nullopt;
  std::vector<ReceivedStorage::Apart> apart;
  for (const auto& elements : separated->elements) {
    apart.push_back(Own(TensorAt(*message, elements.path), elements.pieces, plain));
  }
  return ReceivedStorage(std::move(message), std::move(apart));
}

// Whether `message` could be parsed as it is. False, and nothing is lost, where it should be looked at more closely.
bool ParseAsItIs(grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message) {
  grpc::ProtoBufferReader reader(&bytes);
  const void* data = nullptr;
  int size = 0;
  if (!reader.Next(&data, &size) || size < 2) return false;
  const auto* head = static_cast<const uint8_t*>(data);
  if (IsGzip({head[0], head[1]})) return false;
  reader.BackUp(size);
  return message.ParseFromZeroCopyStream(&reader);
}

// A slice that shares the tensor's memory.
grpc::Slice Share(const Tensor& tensor) {
  auto* owner = new Tensor(tensor);
  return grpc::Slice(
      const_cast<std::byte*>(owner->data()), owner->num_bytes(), [](void* held) { delete static_cast<Tensor*>(held); },
      owner);
}

}  // namespace

absl::Status ParseMessage(grpc::ByteBuffer& bytes, int64_t max_bytes, google::protobuf::MessageLite& message) {
  Plain plain;
  if (auto status = Open(bytes, max_bytes, message, plain); !status.ok()) return status;
  return Parse(plain, bytes, message);
}

std::optional<ReceivedStorage> ReceiveAtOnce(const grpc::ByteBuffer& bytes, int64_t max_bytes,
                                             std::shared_ptr<google::protobuf::Message> message) {
  const auto plain = std::make_shared<Plain>();
  if (static_cast<int64_t>(bytes.Length()) > max_bytes || !bytes.Valid()) return std::nullopt;
  if (!bytes.Dump(&plain->slices).ok() || IsGzip(plain->slices)) return std::nullopt;
  return Apart(plain, std::move(message));
}

absl::StatusOr<ReceivedStorage> ReceiveMessage(grpc::ByteBuffer& bytes, int64_t max_bytes,
                                               std::shared_ptr<google::protobuf::Message> message) {
  if (bytes.Length() <= std::min<size_t>(kCopiedMessageBytes, max_bytes) && ParseAsItIs(bytes, *message)) {
    return ReceivedStorage(std::move(message));
  }
  const auto plain = std::make_shared<Plain>();
  if (auto status = Open(bytes, max_bytes, *message, *plain); !status.ok()) return status;
  const size_t size = plain->is_unpacked ? plain->unpacked.size() : bytes.Length();
  if (size > kCopiedMessageBytes) {
    if (auto storage = Apart(plain, message)) return *std::move(storage);
  }
  if (auto status = Parse(*plain, bytes, *message); !status.ok()) return status;
  return ReceivedStorage(std::move(message));
}

absl::Status SerializeMessage(const google::protobuf::MessageLite& message, grpc::ByteBuffer& bytes) {
  const size_t size = message.ByteSizeLong();
  if (auto status = CheckLegal(size); !status.ok()) return status;
  bytes.Clear();  // the writer ends the process where something is in it
  grpc::ProtoBufferWriter writer(&bytes, grpc::kProtoBufferWriterMaxBufferLength, static_cast<int>(size));
  if (!message.SerializeToZeroCopyStream(&writer)) return InternalError("the answer could not be written");
  return absl::OkStatus();
}

absl::Status SendMessage(const google::protobuf::Message& message, const SentStorage& storage,
                         grpc::ByteBuffer& bytes) {
  if (storage.empty()) return SerializeMessage(message, bytes);
  const Joined joined = Join(message, storage);
  if (auto status = CheckLegal(joined.size()); !status.ok()) return status;
  absl::InlinedVector<grpc::Slice, 8> slices;
  size_t sent = 0;
  for (const auto& [at, tensor] : joined.elements) {
    if (at > sent) slices.emplace_back(joined.bytes.data() + sent, at - sent);
    slices.push_back(Share(*tensor));
    sent = at;
  }
  if (sent < joined.bytes.size()) slices.emplace_back(joined.bytes.data() + sent, joined.bytes.size() - sent);
  bytes = grpc::ByteBuffer(slices.data(), slices.size());
  return absl::OkStatus();
}

}  // namespace layerd::wire
