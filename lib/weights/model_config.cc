#include "lib/weights/model_config.h"

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"
#include "lib/weights/spec_json.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxConfigBytes = uint64_t{4} << 20;
constexpr char kReason[] = "CHECKPOINT_CONFIG";

// Transformers' names (its ACT2FN).
constexpr std::pair<const char*, Activation> kConfigActivations[] = {
    {"silu", Activation::kSilu},
    {"swish", Activation::kSilu},
    {"gelu", Activation::kGelu},
    {"gelu_python", Activation::kGelu},
    {"gelu_new", Activation::kGeluTanh},
    {"gelu_pytorch_tanh", Activation::kGeluTanh},
    {"gelu_fast", Activation::kGeluTanh},
    {"gelu_tanh", Activation::kGeluTanh},
    {"quick_gelu", Activation::kQuickGelu},
    {"relu", Activation::kRelu},
    {"relu2", Activation::kReluSquared},
    {"sigmoid", Activation::kSigmoid},
    {"linear", Activation::kIdentity},
};

const Family* FamilyOf(const Json& object) {
  const auto found = object.is_object() ? object.find("model_type") : object.end();
  return found != object.end() && found->is_string() ? FindFamily(found->get_ref<const std::string&>()) : nullptr;
}

std::string Shown(const Json& value) {
  return Shortened(value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace));
}

}  // namespace

absl::StatusOr<ModelConfig> ModelConfig::Read(const CheckpointFolder& folder) {
  ModelConfig config;
  const auto text = folder.ReadText(kConfigFile, kMaxConfigBytes, kReason);
  if (!text.ok()) return text.status();
  if (!*text) return config;
  auto parsed = ParseJson(**text, Quoted(kConfigFile), kReason);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) {
    return InvalidField("file", kReason,
                        absl::StrCat(Quoted(kConfigFile), ": expected an object, got ", Shown(*parsed)));
  }
  config.top_ = *std::move(parsed);
  if (const auto inner = config.top_.find("text_config"); inner != config.top_.end() && inner->is_object()) {
    config.text_ = std::move(*inner);
  }
  config.family_ = FamilyOf(config.top_);
  if (config.family_ == nullptr) {
    config.family_ = FamilyOf(config.text_);
    config.family_is_texts_ = config.family_ != nullptr;
  }
  return config;
}

bool ModelConfig::describes_one_model() const {
  for (const auto& [key, value] : top_.items()) {
    if (absl::EndsWith(key, "_config") && key != "quantization_config" && !value.is_null()) return false;
  }
  return true;
}

std::optional<Sourced<Json>> ModelConfig::Find(std::string_view keys) const {
  const std::vector<std::string> split = absl::StrSplit(std::string(keys), ' ', absl::SkipEmpty());
  for (const std::string& key : split) {
    for (const bool texts : {family_is_texts_, !family_is_texts_}) {
      const Json& object = texts ? text_ : top_;
      if (!object.is_object()) continue;
      const auto found = object.find(key);
      if (found == object.end() || found->is_null()) continue;
      return Sourced<Json>{*found, absl::StrCat(kConfigFile, ": ", texts ? "text_config." : "", key)};
    }
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<Sourced<double>>> ModelConfig::Epsilon(std::string_view keys) const {
  const auto found = Find(keys);
  if (!found) return std::optional<Sourced<double>>();
  const double value = found->value.is_number() ? found->value.get<double>() : -1;
  if (!(value >= 0 && std::isfinite(value))) {
    return absl::InvalidArgumentError(
        absl::StrCat(found->source, ": expected a number of 0 or more, got ", Shown(found->value)));
  }
  return std::optional(Sourced<double>{value, found->source});
}

absl::StatusOr<std::optional<Sourced<Activation>>> ModelConfig::ActivationOf(std::string_view keys) const {
  const auto found = Find(keys);
  if (!found) return std::optional<Sourced<Activation>>();
  const std::string name = found->value.is_string() ? found->value.get<std::string>() : "";
  if (const auto value = ValueIn(kConfigActivations, name)) {
    // The first Gemma files say "gelu" there and mean the tanh form, which is what the models compute.
    if (family_ != nullptr && family_->gelu_means_tanh && name == "gelu" &&
        absl::EndsWith(found->source, "hidden_act")) {
      return std::optional(Sourced<Activation>{
          Activation::kGeluTanh, absl::StrCat(found->source, ", as family ", family_->model_type, " means it")});
    }
    return std::optional(Sourced<Activation>{*value, found->source});
  }
  std::string names;
  for (const auto& [known, value] : kConfigActivations) absl::StrAppend(&names, names.empty() ? "" : ", ", known);
  return absl::InvalidArgumentError(
      absl::StrCat(found->source, ": expected one of ", names, "; got ", Shown(found->value)));
}

}  // namespace layerd
