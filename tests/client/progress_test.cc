#include "client/progress.h"

#include <gtest/gtest.h>

namespace layerd {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(BytesTextTest, HasOneDecimalInTheUnitInWhichItIsBelow1024) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1024), "1.0 KiB");
  EXPECT_EQ(BytesText(1536), "1.5 KiB");
  EXPECT_EQ(BytesText(1024 * 1024 - 1), "1.0 MiB") << "never 1024.0 KiB";
  EXPECT_EQ(BytesText(541.1 * 1024 * 1024), "541.1 MiB");
  EXPECT_EQ(BytesText(3.0 * 1024 * 1024 * 1024), "3.0 GiB");
  EXPECT_EQ(BytesText(5000.0 * 1024 * 1024 * 1024 * 1024), "5000.0 TiB") << "there is no larger unit";
}

TEST(TimeTextTest, IsRoundedToSeconds) {
  EXPECT_EQ(TimeText(absl::ZeroDuration()), "0:00");
  EXPECT_EQ(TimeText(absl::Milliseconds(6500)), "0:07");
  EXPECT_EQ(TimeText(absl::Milliseconds(59600)), "1:00");
  EXPECT_EQ(TimeText(absl::Seconds(754)), "12:34");
  EXPECT_EQ(TimeText(absl::Seconds(3723)), "1:02:03");
  EXPECT_EQ(TimeText(absl::InfiniteDuration()), "-:--");
  EXPECT_EQ(TimeText(-absl::Seconds(1)), "-:--");
}

TEST(ProgressLineTest, TellsBytesRateAndTimeLeft) {
  EXPECT_EQ(ProgressLine("mlp", 100 * kMiB, 400 * kMiB, absl::Seconds(2), 80),
            "mlp [#####-----------------]  25%  100.0 MiB of 400.0 MiB  50.0 MiB/s  0:06 left");
  EXPECT_EQ(ProgressLine("mlp", 400 * kMiB, 400 * kMiB, absl::Seconds(8), 200),
            "mlp [##############################] 100%  400.0 MiB of 400.0 MiB  50.0 MiB/s  0:00 left");
}

TEST(ProgressLineTest, FitsTheTerminal) {
  const std::string name = "models/llama/layers/model.layers.0.post_attention_layernorm";
  for (int columns = 64; columns < 200; ++columns) {
    std::string line = ProgressLine(name, 1000 * kMiB, 1001 * kMiB, absl::Seconds(1), columns);
    const size_t dots = line.find("…");
    if (dots != std::string::npos) line.replace(dots, 3, ".");  // one column
    EXPECT_LE(line.size(), static_cast<size_t>(columns)) << line;
    EXPECT_NE(line.find("norm "), std::string::npos) << "the name's end is kept: " << line;
  }
  EXPECT_EQ(ProgressLine("mlp", 0, kMiB, absl::Seconds(1), 40).find('['), std::string::npos) << "no room for a bar";
}

TEST(ProgressLineTest, IsSaneAtItsEnds) {
  EXPECT_EQ(ProgressLine("n", 0, 100, absl::ZeroDuration(), 60),
            "n [-------------------]   0%  0 B of 100 B  0 B/s  -:-- left");
  EXPECT_NE(ProgressLine("n", 0, 0, absl::Seconds(1), 80).find("100%"), std::string::npos);
  EXPECT_NE(ProgressLine("n", 999, 1000, absl::Seconds(1), 80).find(" 99%"), std::string::npos)
      << "100% is when all has passed";
}

}  // namespace
}  // namespace layerd
