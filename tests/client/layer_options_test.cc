#include "client/layer_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "lib/layers/seeded.h"

namespace layerd {
namespace {

using testing::HasSubstr;

// What a command line of `args` says.
template <typename Said>
Said Parsed(std::vector<std::string> args) {
  CLI::App app;
  Said said;
  RegisterOptions(app, said);
  std::reverse(args.begin(), args.end());  // as CLI11 wants it
  app.parse(args);
  return said;
}

TEST(LayerOptionsTest, WhatIsNotSaidStaysOpen) {
  EXPECT_FALSE(AnySaid(Parsed<NormalizeSaid>({})));
  EXPECT_FALSE(AnySaid(Parsed<FeedForwardSaid>({})));
  for (const auto& args : std::vector<std::vector<std::string>>{{"--kind", "rms_norm"},
                                                                {"--eps", "0"},
                                                                {"--gate-position", "none"},
                                                                {"--rounding", "after_gamma"},
                                                                {"--gamma-offset", "0"},
                                                                {"--group-size", "0"}}) {
    EXPECT_TRUE(AnySaid(Parsed<NormalizeSaid>(args))) << args[0];
  }
  for (const auto& args : std::vector<std::vector<std::string>>{{"--form", "plain"},
                                                                {"--activation", "relu"},
                                                                {"--swish-beta", "1"},
                                                                {"--packing", "halves"},
                                                                {"--layout", "in_out"},
                                                                {"--gate-max", "1"},
                                                                {"--up-limit", "1"},
                                                                {"--up-offset", "0"},
                                                                {"--inner-norm"},
                                                                {"--inner-norm-eps", "0"}}) {
    EXPECT_TRUE(AnySaid(Parsed<FeedForwardSaid>(args))) << args[0];
  }
}

TEST(LayerOptionsTest, WhatIsSaidGoesOverASpecAndTheRestStays) {
  NormalizeSpec norm{.kind = NormKind::kLayerNorm, .epsilon = 0.25, .gamma_offset = 1, .group_size = 4};
  ASSERT_TRUE(PutOver(Parsed<NormalizeSaid>({"--eps", "0", "--gamma-offset", "0"}), norm).ok());
  EXPECT_EQ(norm.kind, NormKind::kLayerNorm);
  EXPECT_EQ(norm.epsilon, 0);
  EXPECT_EQ(norm.gamma_offset, 0);
  EXPECT_EQ(norm.group_size, 4);

  FeedForwardSpec layer = SwiGluSpec();
  layer.activation.beta = 1.702;
  layer.gate_max = 7;
  ASSERT_TRUE(PutOver(Parsed<FeedForwardSaid>({"--activation", "silu", "--up-limit", "3"}), layer).ok());
  EXPECT_EQ(layer.activation.beta, 1.702) << "the same activation keeps its β";
  EXPECT_EQ(layer.gate_max, 7);
  EXPECT_EQ(layer.up_limit, 3);
  ASSERT_TRUE(PutOver(Parsed<FeedForwardSaid>({"--activation", "gelu"}), layer).ok());
  EXPECT_EQ(layer.activation.beta, 1) << "another activation has none";
  EXPECT_FALSE(layer.inner_norm);
  ASSERT_TRUE(PutOver(Parsed<FeedForwardSaid>({"--inner-norm", "--inner-norm-eps", "0.5"}), layer).ok());
  EXPECT_EQ(layer.inner_norm->epsilon, 0.5);
  ASSERT_TRUE(PutOver(Parsed<FeedForwardSaid>({"--inner-norm"}), layer).ok());
  EXPECT_FALSE(layer.inner_norm->epsilon);
}

TEST(LayerOptionsTest, OptionsThatContradictEachOtherAreRefused) {
  FeedForwardSpec layer = SwiGluSpec();
  EXPECT_THAT(
      std::string(PutOver(Parsed<FeedForwardSaid>({"--activation", "relu", "--swish-beta", "2"}), layer).message()),
      HasSubstr("--swish-beta"));
  layer = SwiGluSpec();
  EXPECT_THAT(
      std::string(PutOver(Parsed<FeedForwardSaid>({"--form", "plain", "--packing", "halves"}), layer).message()),
      HasSubstr("--packing"));
}

TEST(LayerOptionsTest, AZeroThatWouldSayNothingIsRefused) {
  EXPECT_THAT(std::string(CheckSayable(Parsed<NormalizeSaid>({"--gamma-offset", "0"})).message()),
              HasSubstr("--gamma-offset"));
  EXPECT_THAT(std::string(CheckSayable(Parsed<NormalizeSaid>({"--group-size", "0"})).message()),
              HasSubstr("--group-size"));
  EXPECT_THAT(std::string(CheckSayable(Parsed<FeedForwardSaid>({"--up-offset", "0"})).message()),
              HasSubstr("--up-offset"));
  EXPECT_TRUE(CheckSayable(Parsed<NormalizeSaid>({"--eps", "0", "--gamma-offset", "1", "--group-size", "8"})).ok());
  EXPECT_TRUE(CheckSayable(Parsed<FeedForwardSaid>({"--up-offset", "1"})).ok());
}

TEST(LayerOptionsTest, UnknownNamesAreRefused) {
  EXPECT_THROW(Parsed<NormalizeSaid>({"--kind", "batch_norm"}), CLI::ParseError);
  EXPECT_THROW(Parsed<FeedForwardSaid>({"--activation", "SILU"}), CLI::ParseError);
}

}  // namespace
}  // namespace layerd
