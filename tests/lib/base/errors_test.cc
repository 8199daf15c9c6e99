#include "lib/base/errors.h"

#include <gtest/gtest.h>

#include <string>

namespace layerd {
namespace {

TEST(ErrorsTest, FieldErrorsCarryCodeReasonAndPath) {
  const absl::Status status = InvalidField("input.shape", "SHAPE_MISMATCH", "expected [4], got [5]");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "input.shape: expected [4], got [5]");
  EXPECT_EQ(DetailsOf(status).reason, "SHAPE_MISMATCH");
  EXPECT_EQ(DetailsOf(status).field, "input.shape");
  EXPECT_FALSE(DetailsOf(status).retry_delay_ms.has_value());
}

TEST(ErrorsTest, UnderPutsThePathInFrontOnce) {
  const absl::Status inner = InvalidField("shape", "X", "expected [4]");
  const absl::Status outer = Under("weights.gate", inner);
  EXPECT_EQ(outer.message(), "weights.gate.shape: expected [4]");
  EXPECT_EQ(DetailsOf(outer).field, "weights.gate.shape");
  EXPECT_EQ(DetailsOf(outer).reason, "X");
}

TEST(ErrorsTest, UnderNamesTheFieldOfAnErrorWithoutOne) {
  const absl::Status status = Under("shape", InvalidField("", "NEGATIVE_DIMENSION", "expected 0 or more"));
  EXPECT_EQ(status.message(), "shape: expected 0 or more");
  EXPECT_EQ(DetailsOf(status).field, "shape");
}

TEST(ErrorsTest, UnderKeepsTheDelayAndOk) {
  EXPECT_EQ(DetailsOf(Under("a", Overloaded("busy", 7))).retry_delay_ms, 7);
  EXPECT_TRUE(Under("a", absl::OkStatus()).ok());
}

TEST(ErrorsTest, WhatCanNeverFitIsNotToBeRetried) {
  const absl::Status status = TooLarge("input.data", "ANSWER_TOO_LARGE", "expected less");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(status).retry_delay_ms, -1);
}

TEST(ErrorsTest, TextsAreCutToTheirLimit) {
  const absl::Status status = InvalidField("name", "X", std::string(20000, 'n'));
  EXPECT_LE(status.message().size(), kMaxErrorTextBytes + 3);
  EXPECT_TRUE(std::string(status.message()).ends_with("…"));
}

TEST(ErrorsTest, ShortenedNeverCutsAMultiByteCharacter) {
  const std::string text = "aäöü";  // a, then three characters of two bytes
  EXPECT_EQ(Shortened(text, 7), text);
  EXPECT_EQ(Shortened(text, 6), "aäö…");
  EXPECT_EQ(Shortened(text, 4), "aä…");
  EXPECT_EQ(Shortened(text, 0), "…");
}

TEST(ErrorsTest, DetailsOfAForeignStatusAreEmpty) {
  EXPECT_EQ(DetailsOf(absl::InternalError("x")).reason, "");
  EXPECT_EQ(DetailsOf(absl::OkStatus()).field, "");
}

TEST(ErrorsTest, NulInAFieldDoesNotShiftTheOthers) {
  ErrorDetails details;
  details.reason = "R";
  details.field = std::string("a\0b", 3);
  details.resource_name = "n";
  const ErrorDetails read = DetailsOf(WithDetails(absl::StatusCode::kNotFound, "t", details));
  EXPECT_EQ(read.reason, "R");
  EXPECT_EQ(read.field, "a b");
  EXPECT_EQ(read.resource_name, "n");
}

}  // namespace
}  // namespace layerd
