#include "lib/weights/quantization_json.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

using Json = nlohmann::json;

// Takes the members of an object one by one; the first failure counts, and Finish() refuses what was not asked for.
class Members {
 public:
  Members(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object.is_object()) Fail("", "expected an object");
  }

  bool Has(const char* key) const { return object_.is_object() && object_.contains(key); }

  std::string Text(const char* key) {
    const Json* value = Get(key);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    Fail(key, "expected a string");
    return {};
  }

  double Number(const char* key) {
    const Json* value = Get(key);
    if (value != nullptr && value->is_number()) return value->get<double>();
    Fail(key, "expected a number");
    return 0;
  }

  int64_t WholeNumber(const char* key) {
    const Json* value = Get(key);
    // What does not fit int64 comes out negative.
    if (value != nullptr && value->is_number_integer() && value->get<int64_t>() >= 0) return value->get<int64_t>();
    Fail(key, "expected a whole number of 0 or more");
    return 0;
  }

  // Null where there is no list.
  const Json* List(const char* key) {
    const Json* value = Get(key);
    if (value != nullptr && value->is_array()) return value;
    Fail(key, "expected a list");
    return nullptr;
  }

  absl::Status Finish() {
    if (status_.ok() && object_.size() != known_) Fail("", "expected no other keys");
    return status_;
  }

 private:
  const Json* Get(const char* key) {
    ++known_;
    return Has(key) ? &object_.at(key) : nullptr;
  }

  void Fail(const std::string& key, const std::string& text) {
    if (!status_.ok()) return;
    status_ = InvalidField(absl::StrCat(path_, key.empty() ? "" : ".", key), "QUANTIZATION_JSON", text);
  }

  const Json& object_;
  const std::string path_;
  size_t known_ = 0;
  absl::Status status_;
};

}  // namespace

Json QuantizationToJson(const Quantization& quantization) {
  Json matrices = Json::array();
  for (const MatrixError& one : quantization.matrices) {
    matrices.push_back(
        {{"role", one.role}, {"relative_rms_error", one.relative_rms_error}, {"max_abs_error", one.max_abs_error}});
  }
  Json object = {{"source_hash", quantization.source_hash},
                 {"matrices", std::move(matrices)},
                 {"rows", quantization.rows},
                 {"seed", quantization.seed}};
  if (quantization.output_relative_rms_error) {
    object["output_relative_rms_error"] = *quantization.output_relative_rms_error;
  }
  return object;
}

absl::StatusOr<Quantization> QuantizationFromJson(const Json& object) {
  Members members(object, "quantization");
  Quantization quantization;
  quantization.source_hash = members.Text("source_hash");
  const Json* matrices = members.List("matrices");
  if (members.Has("output_relative_rms_error")) {
    quantization.output_relative_rms_error = members.Number("output_relative_rms_error");
  }
  quantization.rows = members.WholeNumber("rows");
  quantization.seed = members.WholeNumber("seed");
  if (auto status = members.Finish(); !status.ok()) return status;
  for (const Json& one : *matrices) {
    Members matrix(one, "quantization.matrices");
    MatrixError error;
    error.role = matrix.Text("role");
    error.relative_rms_error = matrix.Number("relative_rms_error");
    error.max_abs_error = matrix.Number("max_abs_error");
    if (auto status = matrix.Finish(); !status.ok()) return status;
    quantization.matrices.push_back(std::move(error));
  }
  return quantization;
}

}  // namespace layerd
