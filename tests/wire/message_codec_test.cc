#include "wire/message_codec.h"

#include <google/protobuf/io/gzip_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"

namespace layerd::wire {
namespace {

grpc::ByteBuffer Buffer(const std::string& bytes, size_t slice_bytes = 1 << 20) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += slice_bytes) slices.emplace_back(bytes.substr(at, slice_bytes));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Gzip(const std::string& bytes) {
  std::string packed;
  google::protobuf::io::StringOutputStream out(&packed);
  google::protobuf::io::GzipOutputStream gzip(&out);
  void* data;
  int size;
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(size)) {
    if (!gzip.Next(&data, &size)) return "";
    const int used = static_cast<int>(std::min<size_t>(static_cast<size_t>(size), bytes.size() - at));
    std::copy_n(bytes.data() + at, used, static_cast<char*>(data));
    gzip.BackUp(size - used);
    size = used;
  }
  gzip.Close();
  return packed;
}

v1::NormalizeRequest Request(size_t data_bytes) {
  v1::NormalizeRequest request;
  request.mutable_input()->set_dtype(v1::DTYPE_FLOAT32);
  request.mutable_input()->set_data(std::string(data_bytes, 'x'));
  return request;
}

TEST(MessageCodecTest, ABufferIsWrittenOver) {
  grpc::ByteBuffer written;
  for (const size_t size : {1000, 10, 0}) {
    ASSERT_TRUE(SerializeMessage(Request(size), written).ok());
    v1::NormalizeRequest read;
    ASSERT_TRUE(ParseMessage(written, 2000, read).ok());
    EXPECT_EQ(read.input().data().size(), size);
  }
}

TEST(MessageCodecTest, ReadsWhatItWroteInSlicesOfAnySize) {
  const v1::NormalizeRequest request = Request(1000);
  grpc::ByteBuffer written;
  ASSERT_TRUE(SerializeMessage(request, written).ok());
  EXPECT_EQ(written.Length(), request.ByteSizeLong());
  for (const size_t slice_bytes : {1u, 2u, 7u, 100000u}) {
    grpc::ByteBuffer bytes = Buffer(request.SerializeAsString(), slice_bytes);
    v1::NormalizeRequest read;
    ASSERT_TRUE(ParseMessage(bytes, 1 << 20, read).ok()) << slice_bytes;
    EXPECT_EQ(read.SerializeAsString(), request.SerializeAsString());
  }
}

TEST(MessageCodecTest, ReadsGzipInSlicesOfAnySize) {
  const v1::NormalizeRequest request = Request(100000);
  for (const size_t slice_bytes : {1u, 5u, 100000u}) {
    grpc::ByteBuffer bytes = Buffer(Gzip(request.SerializeAsString()), slice_bytes);
    ASSERT_LT(bytes.Length(), 2000u);
    v1::NormalizeRequest read;
    ASSERT_TRUE(ParseMessage(bytes, 1 << 20, read).ok()) << slice_bytes;
    EXPECT_EQ(read.SerializeAsString(), request.SerializeAsString());
  }
}

TEST(MessageCodecTest, AnEmptyMessageIsLegal) {
  grpc::ByteBuffer bytes = Buffer("");
  v1::NormalizeRequest read;
  EXPECT_TRUE(ParseMessage(bytes, 10, read).ok());
  grpc::ByteBuffer none;  // a call without any message
  EXPECT_TRUE(ParseMessage(none, 10, read).ok());
}

TEST(MessageCodecTest, TheLimitHoldsToTheByteAndNamesItsFlag) {
  const v1::NormalizeRequest request = Request(500);
  const auto size = static_cast<int64_t>(request.ByteSizeLong());
  for (const bool gzip : {false, true}) {
    const std::string plain = request.SerializeAsString();
    grpc::ByteBuffer fits = Buffer(gzip ? Gzip(plain) : plain), too_large = Buffer(gzip ? Gzip(plain) : plain);
    v1::NormalizeRequest read;
    EXPECT_TRUE(ParseMessage(fits, size, read).ok());
    const absl::Status status = ParseMessage(too_large, size - 1, read);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(DetailsOf(status).reason, "MESSAGE_TOO_LARGE");
    EXPECT_EQ(DetailsOf(status).retry_delay_ms, -1);
    EXPECT_NE(std::string(status.message()).find("--max_message_mib"), std::string::npos);
  }
}

TEST(MessageCodecTest, AGzipBombIsRefusedAsTooLarge) {
  const std::string bomb = Gzip(Request(64 << 20).SerializeAsString());
  ASSERT_LT(bomb.size(), 1u << 20);
  grpc::ByteBuffer bytes = Buffer(bomb);
  v1::NormalizeRequest read;
  EXPECT_EQ(DetailsOf(ParseMessage(bytes, 1 << 20, read)).reason, "MESSAGE_TOO_LARGE");
  EXPECT_EQ(read.ByteSizeLong(), 0u);
}

TEST(MessageCodecTest, WhatIsNoMessageIsMalformed) {
  const std::string good = Request(100).SerializeAsString();
  for (const std::string& bad : {good.substr(0, good.size() - 1), std::string("\x1F\x8B garbage"), std::string("\xFF"),
                                 std::string("\x0A\xFF\xFF\xFF\xFF\x0F"), Gzip(good).substr(0, Gzip(good).size() / 2),
                                 Gzip(good).substr(0, Gzip(good).size() - 1), Gzip(good) + "x", Gzip("\xFF")}) {
    grpc::ByteBuffer bytes = Buffer(bad);
    v1::NormalizeRequest read;
    const absl::Status status = ParseMessage(bytes, 1 << 20, read);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << testing::PrintToString(bad) << status;
    EXPECT_EQ(DetailsOf(status).reason, "MALFORMED_MESSAGE");
  }
}

}  // namespace
}  // namespace layerd::wire
