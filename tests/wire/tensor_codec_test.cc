#include "wire/tensor_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "lib/base/errors.h"

namespace layerd::wire {
namespace {

v1::Tensor Message(v1::Dtype dtype, std::vector<int64_t> shape, std::string data) {
  v1::Tensor message;
  message.set_dtype(dtype);
  for (const int64_t d : shape) message.add_shape(d);
  message.set_data(std::move(data));
  return message;
}

std::string ReasonOf(const v1::Tensor& message) {
  return DetailsOf(DecodeTensor(message, ReceivedStorage(nullptr)).status()).reason;
}

TEST(TensorCodecTest, RoundTripsEveryDtype) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Tensor tensor = Tensor::FromFloats(dtype, {2, 3}, {0, -0.0f, 1.5f, -2, 3e4f, 1e-5f});
    v1::Tensor message;
    SentStorage storage;
    EncodeTensor(tensor, message, storage);
    EXPECT_TRUE(storage.empty());
    const auto back = DecodeTensor(message, ReceivedStorage(nullptr));
    ASSERT_TRUE(back.ok());
    EXPECT_TRUE(SameBits(*back, tensor));
  }
}

TEST(TensorCodecTest, SharesTheMessagesBytes) {
  auto message = std::make_shared<v1::Tensor>(Message(v1::DTYPE_FLOAT32, {256}, std::string(1024, '\0')));
  const auto tensor = DecodeTensor(*message, ReceivedStorage(message));
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(static_cast<const void*>(tensor->data()), static_cast<const void*>(message->data().data()));
}

TEST(TensorCodecTest, ValuesAreRoundedToTheDtype) {
  v1::Tensor message = Message(v1::DTYPE_BFLOAT16, {2}, "");
  message.add_values(1.0f);
  message.add_values(3.14f);
  const auto tensor = DecodeTensor(message, ReceivedStorage(nullptr));
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(tensor->At(1), 3.140625f);
}

TEST(TensorCodecTest, Int8IsBytesOrWholeNumbers) {
  const Tensor tensor = Tensor::FromFloats(DType::kInt8, {4}, {-128, -1, 0, 127});
  v1::Tensor message;
  SentStorage storage;
  EncodeTensor(tensor, message, storage);
  EXPECT_EQ(message.dtype(), v1::DTYPE_INT8);
  EXPECT_EQ(message.data(), std::string("\x80\xff\x00\x7f", 4));
  EXPECT_TRUE(SameBits(*DecodeTensor(message, ReceivedStorage(nullptr)), tensor));

  v1::Tensor typed = Message(v1::DTYPE_INT8, {4}, "");
  for (const float value : {-128.0f, -1.0f, -0.0f, 127.0f}) typed.add_values(value);
  EXPECT_TRUE(SameBits(*DecodeTensor(typed, ReceivedStorage(nullptr)), tensor));
  for (const float value : {128.0f, -129.0f, 0.5f, 1e30f, INFINITY, NAN}) {
    typed.set_values(1, value);
    const absl::Status status = DecodeTensor(typed, ReceivedStorage(nullptr)).status();
    EXPECT_EQ(DetailsOf(status).field, "values") << value;
    EXPECT_EQ(DetailsOf(status).reason, "OUT_OF_RANGE") << value;
    EXPECT_NE(std::string(status.message()).find("whole numbers of -128 to 127 for DTYPE_INT8"), std::string::npos);
  }
  EXPECT_EQ(ReasonOf(Message(v1::DTYPE_INT8, {3}, "abcd")), "BYTE_COUNT_MISMATCH");
}

TEST(TensorCodecTest, WhatDoesNotFitHasItsReason) {
  EXPECT_EQ(ReasonOf(Message(v1::DTYPE_UNSPECIFIED, {1}, "abcd")), "MISSING");
  EXPECT_EQ(ReasonOf(Message(static_cast<v1::Dtype>(77), {1}, "abcd")), "UNKNOWN_ENUM_VALUE");
  EXPECT_EQ(ReasonOf(Message(v1::DTYPE_FLOAT32, {-1}, "abcd")), "NEGATIVE_DIMENSION");
  EXPECT_EQ(ReasonOf(Message(v1::DTYPE_FLOAT32, {16, (int64_t{1} << 60) + 2}, "abcd")), "DIMENSION_TOO_LARGE");
  EXPECT_EQ(ReasonOf(Message(v1::DTYPE_FLOAT32, {1 << 20, 1 << 20}, "abcd")), "SHAPE_OVERFLOW");
  EXPECT_EQ(ReasonOf(Message(v1::DTYPE_FLOAT32, {2}, "abcd")), "BYTE_COUNT_MISMATCH");
  v1::Tensor both = Message(v1::DTYPE_FLOAT32, {1}, "abcd");
  both.add_values(1);
  EXPECT_EQ(ReasonOf(both), "TWO_SOURCES");
  v1::Tensor few = Message(v1::DTYPE_FLOAT32, {2}, "");
  few.add_values(1);
  EXPECT_EQ(ReasonOf(few), "VALUE_COUNT_MISMATCH");
  v1::Tensor many = Message(v1::DTYPE_FLOAT32, {kMaxTypedValues + 1}, "");
  for (int i = 0; i <= kMaxTypedValues; ++i) many.add_values(0);
  EXPECT_EQ(ReasonOf(many), "TOO_MANY_VALUES");
}

TEST(TensorCodecTest, AnUnknownOptionalDtypeNamesItsOwnField) {
  const auto dtype = DecodeOptionalDType("output_dtype", static_cast<v1::Dtype>(9));
  EXPECT_EQ(DetailsOf(dtype.status()).field, "output_dtype");
  EXPECT_NE(std::string(dtype.status().message()).find("output_dtype: expected DTYPE_FLOAT32"), std::string::npos);
  EXPECT_FALSE(DecodeOptionalDType("output_dtype", v1::DTYPE_UNSPECIFIED)->has_value());
}

}  // namespace
}  // namespace layerd::wire
