// The codec that leaves tensors where they are, against protobuf: on every message, well-formed or not, both say the same.
#include "wire/tensor_fields.h"

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"
#include "wire/message_codec.h"

namespace layerd::wire {
namespace {

using google::protobuf::Message;
using Random = std::mt19937_64;

int Below(Random& random, int end) { return static_cast<int>(random() % static_cast<uint64_t>(end)); }

std::string RandomBytes(Random& random, size_t count) {
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

void FillReference(Random& random, v1::SharedMemory& reference) {
  if (Below(random, 3) != 0) reference.set_region("region");
  if (Below(random, 3) != 0) reference.set_offset(static_cast<int64_t>(random()));
}

void FillTensor(Random& random, v1::Tensor& tensor) {
  if (Below(random, 8) != 0) tensor.set_dtype(static_cast<v1::Dtype>(Below(random, 6)));
  for (int i = Below(random, 4); i > 0; --i) tensor.add_shape(Below(random, 100));
  constexpr size_t kSizes[] = {0, 1, 100, kApartBytes - 1, kApartBytes, kApartBytes + 1, 3 * kApartBytes};
  if (Below(random, 5) != 0) tensor.set_data(RandomBytes(random, kSizes[Below(random, std::size(kSizes))]));
  for (int i = Below(random, 20) == 0 ? 3000 : 0; i > 0; --i) tensor.add_values(1.0f);
  if (Below(random, 4) == 0) FillReference(random, *tensor.mutable_shared_memory());
}

v1::FeedForwardRequest RandomFeedForward(Random& random) {
  v1::FeedForwardRequest request;
  if (Below(random, 8) != 0) FillTensor(random, *request.mutable_input());
  if (Below(random, 2) == 0) request.mutable_spec()->set_up_offset(1.5);
  if (Below(random, 4) != 0) {
    auto& weights = *request.mutable_weights();
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_gate());
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_up());
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_down());
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_down_scale());
  }
  if (Below(random, 2) == 0) request.set_layer("models/m/layers/l");
  request.set_verify(Below(random, 2) == 0);
  if (Below(random, 3) == 0) FillReference(random, *request.mutable_output_memory());
  return request;
}

v1::NormalizeResponse RandomNormalizeResponse(Random& random) {
  v1::NormalizeResponse response;
  FillTensor(random, *response.mutable_output());
  if (Below(random, 2) == 0) FillTensor(random, *response.mutable_residual_sum());
  if (Below(random, 2) == 0) FillTensor(random, *response.mutable_intermediates()->mutable_inverse_rms());
  if (Below(random, 2) == 0) response.mutable_report()->add_stages()->set_stage("norm");
  return response;
}

// What is legal on the wire but seldom seen, and what is not legal.
std::string Mutated(Random& random, std::string bytes, const std::string& other) {
  const auto at = [&] { return bytes.empty() ? 0 : random() % bytes.size(); };
  const auto insert = [&](const std::string& what) { bytes.insert(Below(random, 2) == 0 ? 0 : bytes.size(), what); };
  switch (Below(random, 12)) {
    case 0:
      break;
    case 1:  // merged with another message
      bytes += other;
      break;
    case 2:
      bytes = other + bytes;
      break;
    case 3:
      bytes.resize(at());
      break;
    case 4:
      if (!bytes.empty()) bytes[at()] = static_cast<char>(random());
      break;
    case 5:  // near the beginning, where tags and lengths are
      if (!bytes.empty()) bytes[random() % std::min<size_t>(bytes.size(), 12)] = static_cast<char>(random());
      break;
    case 6:
      bytes.erase(at(), 1 + random() % 3);
      break;
    case 7:
      bytes.insert(at(), RandomBytes(random, 1 + random() % 3));
      break;
    case 8:  // an unknown field of each kind, and an empty group
      insert(std::vector<std::string>{std::string("\x98\x06\x05", 3), std::string("\x99\x06\1\2\3\4\5\6\7\x08", 10),
                                      std::string("\x9A\x06\x02hi", 5), std::string("\x9D\x06\1\2\3\4", 6),
                                      std::string("\x9B\x06\x9C\x06", 4)}[Below(random, 5)]);
      break;
    case 9:  // numbers that are longer than they need be: tag 3·8, wire type 0; a length; ten bytes; eleven
      insert(std::vector<std::string>{
          std::string("\x98\x80\0\1", 4), std::string("\x0A\x80\0", 3),
          std::string("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\1", 11),
          std::string("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F", 11),
          std::string("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\1", 12)}[Below(random, 5)]);
      break;
    case 10:  // field 0, an end of a group alone, a length beyond the end, one beyond 2³¹, the input as a number
      insert(std::vector<std::string>{std::string("\2\0", 2), std::string("\x0C", 1), std::string("\x0A\x7F", 2),
                                      std::string("\x0A\xFF\xFF\xFF\xFF\x0F", 6),
                                      std::string("\x08\1", 2)}[Below(random, 5)]);
      break;
    case 11:  // a name that is not UTF-8
      insert(std::string("\x3A\1\xFF", 3));
      break;
  }
  return bytes;
}

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

// Puts what is apart where protobuf would have put it.
void PutIn(const ReceivedStorage& storage, Message& message) {
  if (message.GetDescriptor() == v1::Tensor::descriptor()) {
    auto& tensor = static_cast<v1::Tensor&>(message);
    const auto* apart = storage.Find(tensor);
    if (apart == nullptr) return;
    EXPECT_EQ(tensor.data(), "");
    for (const auto& piece : apart->elements) {
      tensor.mutable_data()->append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    EXPECT_GE(tensor.data().size(), kApartBytes);
    return;
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const auto* field : fields) {
    if (field->message_type() == nullptr || field->is_repeated()) continue;
    PutIn(storage, *message.GetReflection()->MutableMessage(&message, field));
  }
}

// Whether the message was legal, to both; `apart` counts the tensors that were kept apart.
template <typename OneMessage>
bool BothSayTheSame(Random& random, const std::string& bytes) {
  OneMessage protobufs;
  const bool legal = protobufs.ParseFromString(bytes);
  auto ours = std::make_shared<OneMessage>();
  grpc::ByteBuffer buffer = InSlices(random, bytes);
  const auto storage = ReceiveMessage(buffer, 1 << 20, ours);
  buffer.Clear();
  EXPECT_EQ(storage.ok(), legal) << storage.status();
  if (!legal) {
    EXPECT_EQ(DetailsOf(storage.status()).reason, "MALFORMED_MESSAGE");
    return false;
  }
  if (!storage.ok()) return false;
  PutIn(*storage, *ours);
  EXPECT_EQ(ours->SerializeAsString(), protobufs.SerializeAsString());
  return true;
}

TEST(TensorFieldsTest, ReceivesWhatProtobufDoes) {
  const google::protobuf::LogSilencer silencer;
  Random random(1);
  int legal = 0, refused = 0;
  for (int i = 0; i < 4000 && !HasFailure(); ++i) {
    const bool request = Below(random, 2) == 0;
    const auto bytes = [&] {
      return request ? RandomFeedForward(random).SerializeAsString()
                     : RandomNormalizeResponse(random).SerializeAsString();
    };
    std::string message = Mutated(random, bytes(), bytes());
    if (Below(random, 4) == 0) message = Mutated(random, message, bytes());
    SCOPED_TRACE(i);
    const bool one = request ? BothSayTheSame<v1::FeedForwardRequest>(random, message)
                             : BothSayTheSame<v1::NormalizeResponse>(random, message);
    ++(one ? legal : refused);
  }
  EXPECT_GT(legal, 1000);
  EXPECT_GT(refused, 400);
}

TEST(TensorFieldsTest, LargeElementsStayWhereTheyCame) {
  v1::NormalizeRequest request;
  request.mutable_input()->set_data(std::string(kApartBytes, 'x'));
  request.mutable_gamma()->set_data(std::string(kApartBytes - 1, 'y'));
  grpc::Slice slice(request.SerializeAsString());
  grpc::ByteBuffer buffer(&slice, 1);
  auto message = std::make_shared<v1::NormalizeRequest>();
  const auto storage = ReceiveMessage(buffer, 1 << 20, message);
  ASSERT_TRUE(storage.ok()) << storage.status();
  const auto* apart = storage->Find(message->input());
  ASSERT_NE(apart, nullptr);
  ASSERT_EQ(apart->elements.size(), 1u);
  const auto* at = reinterpret_cast<const uint8_t*>(apart->elements[0].data());
  EXPECT_TRUE(at > slice.begin() && at < slice.end());
  EXPECT_EQ(storage->Find(message->gamma()), nullptr);
  EXPECT_EQ(message->gamma().data().size(), kApartBytes - 1);
}

TEST(TensorFieldsTest, SendsWhatProtobufWould) {
  Random random(2);
  for (int i = 0; i < 300; ++i) {
    v1::FeedForwardRequest whole, rest;
    SentStorage storage;
    const auto fill = [&](v1::Tensor& in_whole, v1::Tensor& in_rest) {
      const int64_t elements = Below(random, 2) == 0 ? Below(random, 100) : kApartBytes / 4 + Below(random, 100);
      Tensor tensor = Tensor::Allocate(DType::kFloat32, {elements});
      const std::string bytes = RandomBytes(random, tensor.num_bytes());
      std::copy_n(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), tensor.mutable_data());
      for (v1::Tensor* to : {&in_whole, &in_rest}) {
        to->set_dtype(v1::DTYPE_FLOAT32);
        to->add_shape(elements);
      }
      in_whole.set_data(bytes);
      if (tensor.num_bytes() < kApartBytes) {
        in_rest.set_data(bytes);
      } else {
        storage.Add(in_rest, tensor);
      }
    };
    if (Below(random, 8) != 0) fill(*whole.mutable_input(), *rest.mutable_input());
    if (Below(random, 2) == 0) {
      fill(*whole.mutable_weights()->mutable_gate(), *rest.mutable_weights()->mutable_gate());
      fill(*whole.mutable_weights()->mutable_down(), *rest.mutable_weights()->mutable_down());
    }
    for (v1::FeedForwardRequest* to : {&whole, &rest}) to->set_layer("models/m/layers/l");
    grpc::ByteBuffer buffer;
    ASSERT_TRUE(SendMessage(rest, storage, buffer).ok());
    storage = SentStorage();  // the bytes keep what they share
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    std::string sent;
    for (const grpc::Slice& slice : slices) sent.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    ASSERT_EQ(sent, whole.SerializeAsString()) << i;
  }
}

TEST(TensorFieldsTest, SentElementsAreNotCopied) {
  const Tensor tensor = Tensor::Allocate(DType::kFloat32, {100000});
  v1::NormalizeResponse response;
  SentStorage storage;
  storage.Add(*response.mutable_output(), tensor);
  grpc::ByteBuffer buffer;
  ASSERT_TRUE(SendMessage(response, storage, buffer).ok());
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer.Dump(&slices).ok());
  bool shared = false;
  for (const grpc::Slice& slice : slices) {
    shared = shared || slice.begin() == reinterpret_cast<const uint8_t*>(tensor.data());
  }
  EXPECT_TRUE(shared);
}

}  // namespace
}  // namespace layerd::wire
