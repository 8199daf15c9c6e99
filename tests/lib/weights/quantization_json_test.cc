#include "lib/weights/quantization_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "lib/base/errors.h"

namespace layerd {
namespace {

Quantization Told() {
  Quantization quantization;
  quantization.source_hash = std::string(64, 'a');
  quantization.matrices = {{"up", 0.1, 1e-300}, {"down", 0, 5e-324}};
  quantization.output_relative_rms_error = 0.0072;
  quantization.rows = 16;
  quantization.seed = 9223372036854775807;
  return quantization;
}

TEST(QuantizationJsonTest, ComesBackToTheBit) {
  for (const bool with_output : {true, false}) {
    Quantization told = Told();
    if (!with_output) told.output_relative_rms_error.reset();
    const auto text = QuantizationToJson(told).dump();
    const auto back = QuantizationFromJson(nlohmann::json::parse(text));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(*back == told) << text;
  }
}

TEST(QuantizationJsonTest, HasTheKeysOfTheMessage) {
  Quantization told = Told();
  told.matrices.pop_back();
  EXPECT_EQ(QuantizationToJson(told).dump(),
            R"({"matrices":[{"max_abs_error":1e-300,"relative_rms_error":0.1,"role":"up"}],)"
            R"("output_relative_rms_error":0.0072,"rows":16,"seed":9223372036854775807,"source_hash":")" +
                std::string(64, 'a') + "\"}");
}

TEST(QuantizationJsonTest, OtherFormsAreRefusedByField) {
  const nlohmann::json good = QuantizationToJson(Told());
  const auto with = [&](const char* pointer, const nlohmann::json& value) {
    nlohmann::json changed = good;
    changed[nlohmann::json::json_pointer(pointer)] = value;
    return changed;
  };
  const auto without = [&](const char* key) {
    nlohmann::json changed = good;
    changed.erase(key);
    return changed;
  };
  nlohmann::json short_matrix = good;
  short_matrix["matrices"][0].erase("role");
  const std::vector<std::pair<nlohmann::json, std::string>> bad = {
      {nlohmann::json::array(), "quantization: expected an object"},
      {nullptr, "quantization: expected an object"},
      {nlohmann::json::object(), "quantization.source_hash: expected a string"},
      {with("/source_hash", 7), "quantization.source_hash: expected a string"},
      {with("/rows", -1), "quantization.rows: expected a whole number"},
      {with("/rows", 1.5), "quantization.rows: expected a whole number"},
      {with("/seed", 9223372036854775808u), "quantization.seed: expected a whole number"},
      {with("/more", 1), "quantization: expected no other keys"},
      {with("/matrices", nullptr), "quantization.matrices: expected a list"},
      {with("/matrices/0", "up"), "quantization.matrices: expected an object"},
      {with("/matrices/0/role", 1), "quantization.matrices.role: expected a string"},
      {with("/matrices/1/max_abs_error", "0"), "quantization.matrices.max_abs_error: expected a number"},
      {with("/matrices/1/more", 0), "quantization.matrices: expected no other keys"},
      {with("/output_relative_rms_error", nullptr), "quantization.output_relative_rms_error: expected a number"},
      {without("rows"), "quantization.rows: expected a whole number"},
      {without("seed"), "quantization.seed: expected a whole number"},
      {without("matrices"), "quantization.matrices: expected a list"},
      {short_matrix, "quantization.matrices.role: expected a string"},
  };
  for (const auto& [json, text] : bad) {
    const absl::Status status = QuantizationFromJson(json).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_EQ(DetailsOf(status).reason, "QUANTIZATION_JSON") << json;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(text)) << json;
  }
}

}  // namespace
}  // namespace layerd
