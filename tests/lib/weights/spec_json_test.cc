#include "lib/weights/spec_json.h"

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lib/base/errors.h"
#include "lib/weights/layer_hash.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// All that a layer without weights is.
std::string Text(const Layer& layer) {
  return CanonicalText(layer, [](std::string_view) { return std::string(); });
}

// Through text, as a file has it.
absl::StatusOr<Layer> ThereAndBack(const Layer& layer) {
  const auto parsed = ParseJson(SpecToJson(layer).dump(), "test", "TEST");
  return parsed.ok() ? SpecFromJson(*parsed) : parsed.status();
}

const std::vector<double> kNumbers = {0.0,
                                      -0.0,
                                      1.0,
                                      -1.0,
                                      0.1,
                                      1e-6,
                                      1.0e-5,
                                      1.702,
                                      1.0 / 3.0,
                                      12345678.9,
                                      7,
                                      1e20,
                                      1e-45,
                                      3.4028235e38,
                                      std::numeric_limits<double>::denorm_min(),
                                      -std::numeric_limits<double>::max()};

TEST(SpecJson, EveryNormComesBack) {
  int count = 0;
  for (const auto& [kind_name, kind] : kNormKindNames) {
    for (const auto& [rounding_name, rounding] : kNormRoundingNames) {
      for (const auto& [gate_name, gate] : kGatePositionNames) {
        for (const int64_t group_size : {int64_t{0}, int64_t{1}, int64_t{128}, kMaxElements}) {
          for (const double number : kNumbers) {
            NormalizeLayer layer;
            layer.spec = {kind, number, rounding, -number, group_size, gate};
            const auto back = ThereAndBack(layer);
            ASSERT_TRUE(back.ok()) << back.status();
            ASSERT_EQ(Text(*back), Text(layer));
            ++count;
          }
        }
      }
    }
  }
  EXPECT_EQ(count, 2 * 2 * 3 * 4 * 16);
}

TEST(SpecJson, EveryFeedForwardLayerComesBack) {
  for (const auto& [activation_name, activation] : kActivationNames) {
    for (const auto& [layout_name, layout] : kWeightLayoutNames) {
      for (const double number : kNumbers) {
        FeedForwardLayer plain;
        plain.spec.form = FeedForwardForm::kPlain;
        plain.spec.activation = {activation, number};
        plain.spec.layout = layout;
        if (number > 1) plain.spec.inner_norm.emplace();
        const auto plain_back = ThereAndBack(plain);
        ASSERT_TRUE(plain_back.ok()) << plain_back.status();
        ASSERT_EQ(Text(*plain_back), Text(plain));
        for (const auto& [packing_name, packing] : kGateUpPackingNames) {
          FeedForwardLayer gated;
          gated.spec.activation = {activation, number};
          gated.spec.packing = packing;
          gated.spec.layout = layout;
          gated.spec.gate_max = number;
          gated.spec.up_limit = -number;
          gated.spec.up_offset = number;
          gated.spec.inner_norm = InnerNorm{number};
          const auto gated_back = ThereAndBack(gated);
          ASSERT_TRUE(gated_back.ok()) << gated_back.status();
          ASSERT_EQ(Text(*gated_back), Text(gated));
        }
      }
    }
  }
}

TEST(SpecJson, IsShort) {
  NormalizeLayer norm;
  norm.spec.rounding = NormRounding::kAfterGamma;
  EXPECT_EQ(SpecToJson(norm).dump(), R"({"normalize":{"epsilon":1e-06,"kind":"rms_norm","rounding":"after_gamma"}})");
  FeedForwardLayer plain;
  plain.spec.form = FeedForwardForm::kPlain;
  plain.spec.activation.kind = Activation::kGeluTanh;
  EXPECT_EQ(SpecToJson(plain).dump(),
            R"({"feed_forward":{"activation":"gelu_tanh","form":"plain","layout":"out_in"}})");
}

TEST(SpecJson, LeavesOtherKeysOfTheObjectAlone) {
  const auto parsed = ParseJson(R"({"a": 1, "normalize": {"kind": "layer_norm"}})", "test", "TEST");
  ASSERT_TRUE(parsed.ok());
  const auto layer = SpecFromJson(*parsed);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(std::get<NormalizeLayer>(*layer).spec.kind, NormKind::kLayerNorm);
  EXPECT_EQ(std::get<NormalizeLayer>(*layer).spec.rounding, NormRounding::kUnspecified);
  EXPECT_FALSE(std::get<NormalizeLayer>(*layer).spec.epsilon);
}

struct BadSpec {
  std::string json;
  std::string field;
  std::string part;
};

TEST(SpecJson, RefusesWhatIsNoSpec) {
  const auto norm = [](const std::string& more) { return R"({"normalize": {"kind": "rms_norm", )" + more + "}}"; };
  const auto gated = [](const std::string& more) {
    return R"({"feed_forward": {"form": "gated", "activation": "silu", "layout": "out_in", )" + more + "}}";
  };
  const std::vector<BadSpec> bad = {
      {"{}", "normalize", "either"},
      {"[]", "normalize", "either"},
      {"null", "normalize", "either"},
      {R"({"normalize": {"kind": "rms_norm"}, "feed_forward": {}})", "normalize", "either"},
      {R"({"normalize": 1})", "normalize", "an object, got 1"},
      {R"({"normalize": []})", "normalize", "an object, got []"},
      {R"({"feed_forward": "gelu"})", "feed_forward", "an object, got \"gelu\""},
      {R"({"normalize": {}})", "normalize.kind", "rms_norm, layer_norm, got nothing"},
      {R"({"normalize": {"kind": "RMS_NORM"}})", "normalize.kind", "got \"RMS_NORM\""},
      {R"({"normalize": {"kind": 0}})", "normalize.kind", "got 0"},
      {R"({"normalize": {"kind": null}})", "normalize.kind", "got null"},
      {R"({"normalize": {"kind": "unspecified"}})", "normalize.kind", "got"},
      {norm(R"("epsilon": "1e-6")"), "normalize.epsilon", "a number, got \"1e-6\""},
      {norm(R"("epsilon": null)"), "normalize.epsilon", "a number, got null"},
      {norm(R"("epsilon": true)"), "normalize.epsilon", "a number, got true"},
      {norm(R"("epsilon": [1])"), "normalize.epsilon", "a number, got [1]"},
      {norm(R"("epsilonn": 1)"), "normalize.epsilonn", "no such option"},
      {norm(R"("rounding": "before")"), "normalize.rounding", "before_gamma, after_gamma, got \"before\""},
      {norm(R"("gamma_offset": {})"), "normalize.gamma_offset", "a number"},
      {norm(R"("group_size": 1.5)"), "normalize.group_size", "a whole number"},
      {norm(R"("group_size": 1.0)"), "normalize.group_size", "a whole number"},
      {norm(R"("group_size": -1)"), "normalize.group_size", "a whole number"},
      {norm(R"("group_size": 18446744073709551615)"), "normalize.group_size", "a whole number"},
      {norm(R"("gate_position": 1)"), "normalize.gate_position", "none, first, last"},
      {norm(R"("normalized_axes": 1)"), "normalize.normalized_axes", "no such option"},
      {R"({"feed_forward": {}})", "feed_forward.form", "got nothing"},
      {R"({"feed_forward": {"form": "gated"}})", "feed_forward.activation", "got nothing"},
      {R"({"feed_forward": {"form": "plain", "activation": "swish", "layout": "out_in"}})", "feed_forward.activation",
       "got \"swish\""},
      {R"({"feed_forward": {"form": "plain", "activation": "relu"}})", "feed_forward.layout", "got nothing"},
      {gated(R"("up_offset": 0)"), "feed_forward.packing", "got nothing"},
      {gated(R"("packing": "halves", "gate_max": "7")"), "feed_forward.gate_max", "a number"},
      {gated(R"("packing": "halves", "inner_norm": 1)"), "feed_forward.inner_norm", "an object"},
      {gated(R"("packing": "halves", "inner_norm": {"epsilon": "x"})"), "feed_forward.inner_norm.epsilon", "a number"},
      {gated(R"("packing": "halves", "inner_norm": {"eps": 1})"), "feed_forward.inner_norm.eps", "no such option"},
      {gated(R"("packing": "halves", ")" + std::string(100'000, 'k') + "\": 1"), "feed_forward.kkk", "no such option"},
      {norm("\"epsilon\": \"" + std::string(100'000, 'v') + "\""), "normalize.epsilon", "a number"},
  };
  for (const BadSpec& one : bad) {
    const auto parsed = ParseJson(one.json, "test", "TEST");
    ASSERT_TRUE(parsed.ok()) << one.json << parsed.status();
    const auto status = SpecFromJson(*parsed).status();
    EXPECT_EQ(status.code(), kInvalid) << one.json;
    EXPECT_THAT(DetailsOf(status).field, StartsWith(one.field)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(one.part)) << one.json;
    EXPECT_LT(status.message().size(), kMaxErrorTextBytes);
  }
}

TEST(ParseJson, TakesWhatIsJson) {
  for (const char* text : {"{}", " {\n} ", "[]", "null", "1e-45", "\"\\u00e9\"",
                           R"({"a": {"b": 1}, "b": {"a": 1, "b": 2}})", R"([{"a": 1}, {"a": 1}])"}) {
    EXPECT_TRUE(ParseJson(text, "test", "TEST").ok()) << text;
  }
  const std::string deep = std::string(64, '[') + std::string(64, ']');
  EXPECT_TRUE(ParseJson(deep, "test", "TEST").ok());
}

TEST(ParseJson, RefusesWhatIsNot) {
  const std::string nul(1, '\0');
  const auto nested = [](const std::string& open, const std::string& close, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += open;
    for (int i = 0; i < times; ++i) text += close;
    return text;
  };
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "not JSON"},
      {"{", "not JSON"},
      {"{}}", "not JSON"},
      {"{} {}", "not JSON"},
      {"{'a': 1}", "not JSON"},
      {"{a: 1}", "not JSON"},
      {"{\"a\": 1,}", "not JSON"},
      {"{\"a\": NaN}", "not JSON"},
      {"{\"a\": Infinity}", "not JSON"},
      {"{\"a\": -Infinity}", "not JSON"},
      {"{\"a\": 1e999}", "not JSON"},
      {"{\"a\": 01}", "not JSON"},
      {"{\"a\": .5}", "not JSON"},
      {"{\"a\": \"\xff\"}", "not JSON"},
      {"{/* */}", "not JSON"},
      {"{}" + nul + "garbage", "NUL"},
      {R"({"a": 1, "a": 1})", "\"a\" stands there twice"},
      {R"({"a": 1, "\u0061": 2})", "\"a\" stands there twice"},
      {R"({"x": {"a": 1, "b": 2, "a": 3}})", "\"a\" stands there twice"},
      {R"([{"a": [{"b": 1}, {"b": 1, "b": 1}]}])", "\"b\" stands there twice"},
      {nested("[", "]", 66), "64 levels"},
      {nested("[", "]", 100'000), "64 levels"},
      {nested("[", "", 100'000), "64 levels"},
      {nested("{\"a\":", "}", 100'000), "64 levels"},
  };
  for (const auto& [text, part] : bad) {
    const auto status = ParseJson(text, "the file", "TEST").status();
    EXPECT_EQ(status.code(), kInvalid) << text.substr(0, 100);
    EXPECT_EQ(DetailsOf(status).reason, "TEST");
    EXPECT_EQ(DetailsOf(status).field, "file");
    EXPECT_THAT(std::string(status.message()), StartsWith("file: the file: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(part)) << text.substr(0, 100);
  }
}

}  // namespace
}  // namespace layerd
