#include "lib/weights/layer_name.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

using namespace std::string_literals;

TEST(LayerName, ComesBackFromItsFullName) {
  const auto name = ParseLayerName("models/stories260k/layers/model.layers.0.mlp");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->model, "stories260k");
  EXPECT_EQ(name->layer, "model.layers.0.mlp");
  EXPECT_EQ(name->Full(), "models/stories260k/layers/model.layers.0.mlp");
}

TEST(LayerName, TakesWhatIsASafeNameOfAFile) {
  const std::string longest(kMaxNamePartBytes, 'x');
  for (const std::string& part : {"a"s, "Z9"s, "_"s, "-"s, "-rf"s, "a..b"s, "a."s, "layers"s, "x.json"s, longest}) {
    EXPECT_TRUE(IsNamePart(part)) << part;
    EXPECT_TRUE(ParseLayerName("models/" + part + "/layers/" + part)) << part;
  }
}

TEST(LayerName, RefusesEverythingElse) {
  const std::string too_long(kMaxNamePartBytes + 1, 'x');
  for (const std::string& part : {""s, "."s, ".."s, ".hidden"s, "a/b"s, "../x"s, "a b"s, "a\0b"s, "a\n"s, "%2e%2e"s,
                                  "é"s, "a:b"s, "a\\b"s, "~"s, too_long}) {
    EXPECT_FALSE(IsNamePart(part)) << part;
    EXPECT_FALSE(ParseLayerName("models/" + part + "/layers/l")) << part;
    EXPECT_FALSE(ParseLayerName("models/m/layers/" + part)) << part;
  }
  for (const char* name :
       {"", "models", "models/", "models/m", "models/m/layers", "models/m/layers/", "/models/m/layers/l",
        "models//layers/l", "models/m/layers/l/", "models/m/layers/l/x", "model/m/layers/l", "Models/m/layers/l",
        "models/m/layer/l", "models/m/layers/layers/l", " models/m/layers/l"}) {
    EXPECT_FALSE(ParseLayerName(name)) << name;
  }
}

TEST(LayerName, WhatIsNotFoundIsQuotedAndShortened) {
  const auto status = LayerNotFound("layer", "models/m/layers/" + std::string(20'000, 'x') + "\n");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("layer: there is no layer \"models/m/layers/xxx"));
  EXPECT_LT(status.message().size(), 2 * kMaxQuotedBytes);
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(details.reason, "LAYER_NOT_FOUND");
  EXPECT_EQ(details.field, "layer");
  EXPECT_EQ(details.resource_type, "layer");
  EXPECT_LE(details.resource_name.size(), kMaxQuotedBytes + 3);
}

}  // namespace
}  // namespace layerd
