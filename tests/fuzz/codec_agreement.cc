#include "tests/fuzz/codec_agreement.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "lib/base/errors.h"
#include "wire/message_codec.h"

namespace layerd {
namespace {

using google::protobuf::Message;

grpc::ByteBuffer InSlices(Random& random, const std::string& bytes) {
  std::vector<grpc::Slice> slices;
  const size_t largest = size_t{1} << Below(random, 15);
  for (size_t at = 0; at < bytes.size();) {
    const size_t count = std::min<size_t>(bytes.size() - at, 1 + random() % largest);
    slices.emplace_back(bytes.substr(at, count));
    if (Below(random, 10) == 0) slices.emplace_back(std::string());
    at += count;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Puts what is apart where protobuf would have put it; tells what is wrong with it.
std::string PutIn(const wire::ReceivedStorage& storage, Message& message) {
  if (message.GetDescriptor() == v1::Tensor::descriptor()) {
    auto& tensor = static_cast<v1::Tensor&>(message);
    const auto* apart = storage.Find(tensor);
    if (apart == nullptr) return "";
    if (!tensor.data().empty()) return "elements that are apart are in the message too";
    for (const auto& piece : apart->elements) {
      tensor.mutable_data()->append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    return tensor.data().size() < wire::kApartBytes ? "a small tensor is apart" : "";
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const auto* field : fields) {
    if (field->message_type() == nullptr || field->is_repeated()) continue;
    auto wrong = PutIn(storage, *message.GetReflection()->MutableMessage(&message, field));
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace

Agreement Compare(Random& random, const Message& prototype, const std::string& bytes) {
  const std::unique_ptr<Message> protobufs(prototype.New());
  const bool legal = protobufs->ParseFromString(bytes);
  const std::shared_ptr<Message> ours(prototype.New());
  grpc::ByteBuffer buffer = InSlices(random, bytes);
  const auto storage = wire::ReceiveMessage(buffer, 1 << 20, ours);
  buffer.Clear();
  if (storage.ok() != legal) return {legal, legal ? "refused: " + storage.status().ToString() : "taken"};
  if (!legal) {
    const std::string reason = DetailsOf(storage.status()).reason;
    return {legal, reason == "MALFORMED_MESSAGE" ? "" : "the reason is " + reason};
  }
  std::string wrong = PutIn(*storage, *ours);
  if (wrong.empty() && ours->SerializeAsString() != protobufs->SerializeAsString()) wrong = "another message";
  return {legal, wrong};
}

}  // namespace layerd
