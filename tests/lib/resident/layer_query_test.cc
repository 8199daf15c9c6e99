#include "lib/resident/layer_query.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "lib/base/errors.h"
#include "tests/lib/resident/memory_catalog.h"

namespace layerd {
namespace {

using ::testing::HasSubstr;

TEST(FitsPatternTest, AStarStandsForAnyNumberOfCharacters) {
  struct Case {
    const char* pattern;
    const char* text;
    bool fits;
  };
  for (const Case& one : {Case{"", "", true},
                          {"", "a", false},
                          {"a", "", false},
                          {"*", "", true},
                          {"*", "models/m/layers/l", true},
                          {"**", "a", true},
                          {"abc", "abc", true},
                          {"abc", "abcd", false},
                          {"abc", "ab", false},
                          {"a*", "a", true},
                          {"*.mlp", "model.layers.0.mlp", true},
                          {"*.mlp", "model.layers.0.mlp.x", false},
                          {"*.mlp", "mlp", false},
                          {"model.layers.*.mlp", "model.layers.10.mlp", true},
                          {"*a*b", "xaxxabxb", true},
                          {"*a*b", "xaxxabxbc", false},
                          {"*ab*ab", "abab", true},
                          {"*ab*ab", "aab", false},
                          {"a?c", "abc", false},
                          {"[ab]", "a", false}}) {
    EXPECT_EQ(FitsPattern(one.pattern, one.text), one.fits) << one.pattern << " " << one.text;
  }
}

TEST(FitsPatternTest, ManyStarsTakeNoTime) {
  std::string pattern;
  for (int i = 0; i < 512; ++i) pattern += "*a";
  EXPECT_FALSE(FitsPattern(pattern + "b", std::string(10000, 'a')));
}

class LayerFilterTest : public testing::Test {
 protected:
  LayerFilterTest() {
    norm_ = MemoryRecord("models/m/layers/norm", SeededNormLayer(1, 8)).info();
    mlp_ = MemoryRecord("models/m/layers/mlp", SeededSwiGluLayer(1, 8, 12)).info();
    mlp_.uploaded = true;
    damaged_ = norm_;
    damaged_.status = absl::FailedPreconditionError("damaged");
  }

  // Which of norm, mlp (an upload, prepared) and damaged the filter leaves: "nmd".
  static std::string Kept(std::string_view filter) {
    const auto parsed = LayerFilter::Parse(filter);
    if (!parsed.ok()) return std::string(parsed.status().message());
    std::string kept;
    if (parsed->Holds(norm_, "norm", false)) kept += "n";
    if (parsed->Holds(mlp_, "mlp", true)) kept += "m";
    if (parsed->Holds(damaged_, "damaged", false)) kept += "d";
    return kept;
  }

  static inline LayerInfo norm_, mlp_, damaged_;
};

TEST_F(LayerFilterTest, AllTermsMustHold) {
  EXPECT_EQ(Kept(""), "nmd");
  EXPECT_EQ(Kept("  "), "nmd");
  EXPECT_EQ(Kept("kind:normalize"), "n");  // what the damaged one is, is not known
  EXPECT_EQ(Kept("kind:feed_forward"), "m");
  EXPECT_EQ(Kept("source:checkpoint"), "nd");
  EXPECT_EQ(Kept("source:upload"), "m");
  EXPECT_EQ(Kept("state:usable"), "nm");
  EXPECT_EQ(Kept("state:unusable"), "d");
  EXPECT_EQ(Kept("state:prepared"), "m");
  EXPECT_EQ(Kept("*m*"), "nmd");
  EXPECT_EQ(Kept("n*"), "n");
  EXPECT_EQ(Kept(" state:usable  *m* *p "), "m");
  EXPECT_EQ(Kept("state:usable state:unusable"), "");
  EXPECT_EQ(Kept("kind:normalize kind:normalize"), "n");
}

TEST_F(LayerFilterTest, OtherTermsAreRefusedWithWhatIsExpected) {
  for (const char* filter : {"kind:", "kind:moe", "Kind:normalize", "state:usable,prepared", "models/m/layers/norm",
                             "a:b", "\"mlp\"", "x\ty", "norm\n", "%2e", "\xff"}) {
    const auto parsed = LayerFilter::Parse(filter);
    ASSERT_FALSE(parsed.ok()) << filter;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailsOf(parsed.status()).field, "filter");
    EXPECT_EQ(DetailsOf(parsed.status()).reason, "UNKNOWN_TERM");
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("state:prepared"));
  }
  EXPECT_THAT(Kept("kind:moe"), HasSubstr("got \"kind:moe\""));
  EXPECT_EQ(DetailsOf(LayerFilter::Parse(std::string(1025, 'a')).status()).reason, "FILTER_TOO_LONG");
  EXPECT_TRUE(LayerFilter::Parse(std::string(1024, 'a')).ok());
}

TEST(PageTest, SizesHaveADefaultAndALimit) {
  EXPECT_EQ(*PageSizeOf({}), 100);
  EXPECT_EQ(*PageSizeOf({.page_size = 1}), 1);
  EXPECT_EQ(*PageSizeOf({.page_size = 1000}), 1000);
  EXPECT_EQ(*PageSizeOf({.page_size = 1001}), 1000);
  EXPECT_EQ(DetailsOf(PageSizeOf({.page_size = -1}).status()).field, "page_size");
}

TEST(PageTest, ATokenStandsForItsPlaceInItsList) {
  LayerQuery query{.model = "m", .filter = "*.mlp", .page_size = 5};
  EXPECT_EQ(*NameBefore(query), "");
  query.page_token = PageTokenBehind(query, "models/m/layers/a");
  EXPECT_EQ(*NameBefore(query), "models/m/layers/a");
  query.page_size = 7;
  EXPECT_TRUE(NameBefore(query).ok());

  LayerQuery other = query;
  other.filter = "*";
  EXPECT_EQ(DetailsOf(NameBefore(other).status()).reason, "BAD_PAGE_TOKEN");
  other = query;
  other.model = "";
  EXPECT_EQ(DetailsOf(NameBefore(other).status()).field, "page_token");
}

TEST(PageTest, RubbishIsNoToken) {
  LayerQuery query;
  const std::string good = PageTokenBehind(query, "models/m/layers/a");
  for (const std::string& token :
       {std::string("x"), std::string("!!!!"), std::string(1, '\0'), good.substr(0, good.size() - 4), good + "A",
        "A" + good, std::string(100000, 'A'), absl::WebSafeBase64Escape("0123456789abcdef"),
        absl::WebSafeBase64Escape("0123456789abcdefmodels/../layers/a"), PageTokenBehind(query, ""),
        PageTokenBehind(query, "models/m/layers/a/b")}) {
    query.page_token = token;
    const auto name = NameBefore(query);
    // Cut or changed, it may still be well formed, but then it is the token of another place or of another list.
    if (name.ok()) {
      EXPECT_NE(*name, "models/m/layers/a") << token;
      continue;
    }
    EXPECT_EQ(DetailsOf(name.status()).reason, "BAD_PAGE_TOKEN");
    EXPECT_EQ(DetailsOf(name.status()).field, "page_token");
    EXPECT_LE(name.status().message().size(), 300u);
  }
}

}  // namespace
}  // namespace layerd
