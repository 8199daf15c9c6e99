#include "wire/status_codec.h"

#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "lib/base/errors.h"

namespace layerd::wire {
namespace {

TEST(StatusCodecTest, ErrorsSurviveTheWire) {
  for (const absl::Status& status : {InvalidField("input.shape", "SHAPE_MISMATCH", "expected [4], got [5]"),
                                     TooLarge("verify", "VERIFY_TOO_LARGE", "x"), Overloaded("busy", 1234), Draining(),
                                     ExpiredWhileWaiting("late"), InternalError("oops")}) {
    const absl::Status back = DecodeStatus(EncodeStatus(status));
    EXPECT_EQ(back.code(), status.code());
    EXPECT_EQ(back.message(), status.message());
    EXPECT_EQ(DetailsOf(back).reason, DetailsOf(status).reason);
    EXPECT_EQ(DetailsOf(back).field, DetailsOf(status).field);
    if (DetailsOf(status).retry_delay_ms.value_or(-1) >= 0) {
      EXPECT_EQ(DetailsOf(back).retry_delay_ms, DetailsOf(status).retry_delay_ms);
    }
  }
  EXPECT_TRUE(EncodeStatus(absl::OkStatus()).ok());
}

TEST(StatusCodecTest, DetailsHaveThePublishedTypes) {
  const grpc::Status status = EncodeStatus(InvalidField("input.shape", "SHAPE_MISMATCH", "expected [4], got [5]"));
  google::rpc::Status rich;
  ASSERT_TRUE(rich.ParseFromString(status.error_details()));
  EXPECT_EQ(rich.code(), 3);
  ASSERT_EQ(rich.details_size(), 2);
  EXPECT_EQ(rich.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  google::rpc::BadRequest bad_request;
  ASSERT_TRUE(rich.details(1).UnpackTo(&bad_request));
  EXPECT_EQ(bad_request.field_violations(0).field(), "input.shape");
  EXPECT_EQ(bad_request.field_violations(0).description(), "expected [4], got [5]");
  EXPECT_EQ(bad_request.field_violations(0).reason(), "SHAPE_MISMATCH");
}

TEST(StatusCodecTest, PushbackSaysWhenOrNever) {
  EXPECT_EQ(PushbackOf(Overloaded("busy", 1234)), "1234");
  EXPECT_EQ(PushbackOf(TooLarge("x", "R", "t")), "-1");
  EXPECT_EQ(PushbackOf(InvalidField("x", "R", "t")), std::nullopt);
}

TEST(StatusCodecTest, RetryInfoIsThereOnlyWhenToRetryHelps) {
  const auto has_retry_info = [](const absl::Status& status) {
    google::rpc::Status rich;
    rich.ParseFromString(EncodeStatus(status).error_details());
    for (const auto& any : rich.details()) {
      if (any.Is<google::rpc::RetryInfo>()) return true;
    }
    return false;
  };
  EXPECT_TRUE(has_retry_info(Overloaded("busy", 0)));
  EXPECT_FALSE(has_retry_info(TooLarge("x", "R", "t")));
}

TEST(StatusCodecTest, LongTextsStayWithinThePeersMetadataLimit) {
  std::string snowmen;
  while (snowmen.size() < 20000) snowmen += "☃";
  const grpc::Status status = EncodeStatus(InvalidField("name", "R", snowmen));
  // gRPC percent-encodes each byte of the text to three, and carries the details in base64.
  EXPECT_LT(3 * status.error_message().size() + status.error_details().size() * 4 / 3, 8000u);
}

TEST(StatusCodecTest, DetailsThatCannotBeReadAreLeftEmpty) {
  const absl::Status status = DecodeStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone", "no protobuf"));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(DetailsOf(status).reason, "");
}

}  // namespace
}  // namespace layerd::wire
