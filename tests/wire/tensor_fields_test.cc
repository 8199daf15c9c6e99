// The codec that leaves tensors where they are, against protobuf: on every message, well-formed or not, both say the same.
#include "wire/tensor_fields.h"

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layerd/v1/layer_service.pb.h"
#include "tests/fuzz/codec_agreement.h"
#include "tests/fuzz/random_messages.h"
#include "wire/message_codec.h"

namespace layerd::wire {
namespace {

TEST(TensorFieldsTest, ReceivesWhatProtobufDoes) {
  const google::protobuf::LogSilencer silencer;
  Random random(1);
  int legal = 0, refused = 0;
  for (int i = 0; i < 4000; ++i) {
    const bool request = Below(random, 2) == 0;
    const auto bytes = [&] {
      return request ? RandomFeedForward(random).SerializeAsString()
                     : RandomNormalizeResponse(random).SerializeAsString();
    };
    std::string message = Mutated(random, bytes(), bytes());
    if (Below(random, 4) == 0) message = Mutated(random, message, bytes());
    const Agreement both = request ? Compare(random, v1::FeedForwardRequest::default_instance(), message)
                                   : Compare(random, v1::NormalizeResponse::default_instance(), message);
    ASSERT_EQ(both.difference, "") << i;
    ++(both.legal ? legal : refused);
  }
  EXPECT_GT(legal, 1000);
  EXPECT_GT(refused, 400);
}

TEST(TensorFieldsTest, LargeElementsStayWhereTheyCame) {
  v1::NormalizeRequest request;
  request.mutable_input()->set_data(std::string(kApartBytes, 'x'));
  request.mutable_residual()->set_data(std::string(kCopiedMessageBytes, 'z'));
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

TEST(TensorFieldsTest, SmallMessagesAreCopied) {
  v1::NormalizeRequest request;
  request.mutable_input()->set_data(std::string(kApartBytes, 'x'));
  grpc::Slice slice(request.SerializeAsString());
  grpc::ByteBuffer buffer(&slice, 1);
  auto message = std::make_shared<v1::NormalizeRequest>();
  const auto storage = ReceiveMessage(buffer, 1 << 20, message);
  ASSERT_TRUE(storage.ok()) << storage.status();
  EXPECT_EQ(storage->Find(message->input()), nullptr);
  EXPECT_EQ(message->input().data(), std::string(kApartBytes, 'x'));
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
