#include "lib/weights/spec_json.h"

#include <cmath>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 64;

absl::Status Wrong(const std::string& path, const std::string& text) { return InvalidField(path, "SPEC_JSON", text); }

// −0 is another number: the content hash tells them apart.
bool IsPlainZero(double value) { return value == 0 && !std::signbit(value); }

std::string Shown(const Json& value) {
  return Shortened(value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace));
}

// Reads the members of one object; Finish() refuses those that nobody asked for.
class Members {
 public:
  Members(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object.is_object()) status_ = Wrong(path_, absl::StrCat("expected an object, got ", Shown(object)));
  }

  bool Has(const char* key) {
    known_.insert(key);
    return status_.ok() && object_.contains(key);
  }

  template <typename T, size_t kRows>
  void Name(const char* key, const std::pair<const char*, T> (&table)[kRows], T& to, bool required) {
    std::string names;
    for (const auto& [name, value] : table) absl::StrAppend(&names, names.empty() ? "" : ", ", name);
    if (!Has(key)) {
      if (required && status_.ok()) {
        status_ = MissingField(PathOf(key), absl::StrCat("expected one of ", names, ", got nothing"));
      }
      return;
    }
    const Json& value = object_.at(key);
    const auto known = value.is_string() ? ValueIn(table, value.get_ref<const std::string&>()) : std::nullopt;
    if (known) {
      to = *known;
    } else {
      status_ = Wrong(PathOf(key), absl::StrCat("expected one of ", names, ", got ", Shown(value)));
    }
  }

  template <typename T>
  void Number(const char* key, T& to) {
    if (!Has(key)) return;
    const Json& value = object_.at(key);
    if (value.is_number() && std::isfinite(value.get<double>())) {
      to = value.get<double>();
    } else {
      status_ = Wrong(PathOf(key), absl::StrCat("expected a number, got ", Shown(value)));
    }
  }

  void WholeNumber(const char* key, int64_t& to) {
    if (!Has(key)) return;
    const Json& value = object_.at(key);
    if (value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(kMaxElements)) {
      to = value.get<int64_t>();
    } else {
      status_ = Wrong(PathOf(key), absl::StrCat("expected a whole number of 0 or more, got ", Shown(value)));
    }
  }

  const Json& At(const char* key) const { return object_.at(key); }
  std::string PathOf(const std::string& key) const { return absl::StrCat(path_, ".", key); }
  void Fail(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  absl::Status Finish() {
    if (!status_.ok()) return status_;
    for (const auto& item : object_.items()) {
      if (known_.count(item.key()) == 0) {
        return Wrong(PathOf(Shortened(item.key())), "expected nothing: there is no such option");
      }
    }
    return absl::OkStatus();
  }

 private:
  const Json& object_;
  const std::string path_;
  std::set<std::string> known_;
  absl::Status status_;
};

absl::StatusOr<Layer> NormalizeFromJson(const Json& object) {
  NormalizeLayer layer;
  NormalizeSpec& spec = layer.spec;
  Members members(object, "normalize");
  members.Name("kind", kNormKindNames, spec.kind, /*required=*/true);
  members.Number("epsilon", spec.epsilon);
  members.Name("rounding", kNormRoundingNames, spec.rounding, /*required=*/false);
  members.Number("gamma_offset", spec.gamma_offset);
  members.WholeNumber("group_size", spec.group_size);
  members.Name("gate_position", kGatePositionNames, spec.gate_position, /*required=*/false);
  if (auto status = members.Finish(); !status.ok()) return status;
  return Layer(std::move(layer));
}

absl::StatusOr<Layer> FeedForwardFromJson(const Json& object) {
  FeedForwardLayer layer;
  FeedForwardSpec& spec = layer.spec;
  Members members(object, "feed_forward");
  members.Name("form", kFeedForwardFormNames, spec.form, /*required=*/true);
  members.Name("activation", kActivationNames, spec.activation.kind, /*required=*/true);
  members.Number("swish_beta", spec.activation.beta);
  members.Name("packing", kGateUpPackingNames, spec.packing, spec.form == FeedForwardForm::kGated);
  members.Name("layout", kWeightLayoutNames, spec.layout, /*required=*/true);
  members.Number("gate_max", spec.gate_max);
  members.Number("up_limit", spec.up_limit);
  members.Number("up_offset", spec.up_offset);
  if (members.Has("inner_norm")) {
    spec.inner_norm.emplace();
    Members inner(members.At("inner_norm"), members.PathOf("inner_norm"));
    inner.Number("epsilon", spec.inner_norm->epsilon);
    members.Fail(inner.Finish());
  }
  if (auto status = members.Finish(); !status.ok()) return status;
  return Layer(std::move(layer));
}

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, std::string_view source, std::string_view reason) {
  absl::Status status;
  const auto fail = [&](const std::string& what) {
    if (status.ok()) status = InvalidField("file", reason, absl::StrCat(std::string(source), ": ", what));
  };
  // nlohmann takes a NUL for the end of the text and would not look at what follows.
  if (text.find('\0') != std::string_view::npos) {
    fail("the text is not JSON: it has a NUL");
    return status;
  }
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto look = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) fail(absl::StrCat("expected at most ", kMaxDepth, " levels of nesting"));
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) fail(absl::StrCat("the key ", Quoted(key), " stands there twice"));
    }
    return status.ok();  // what is not kept takes no memory
  };
  Json parsed = Json::parse(text.begin(), text.end(), look, /*allow_exceptions=*/false);
  if (!status.ok()) return status;
  if (parsed.is_discarded()) {
    fail("the text is not JSON");
    return status;
  }
  return parsed;
}

Json SpecToJson(const Layer& layer) {
  if (const auto* norm = std::get_if<NormalizeLayer>(&layer)) {
    const NormalizeSpec& spec = norm->spec;
    Json object = {{"kind", NameIn(kNormKindNames, spec.kind)}, {"epsilon", EpsilonOf(spec)}};
    if (spec.rounding != NormRounding::kUnspecified) object["rounding"] = NameIn(kNormRoundingNames, spec.rounding);
    if (!IsPlainZero(spec.gamma_offset)) object["gamma_offset"] = spec.gamma_offset;
    if (spec.group_size != 0) object["group_size"] = spec.group_size;
    if (spec.gate_position != GatePosition::kNone) {
      object["gate_position"] = NameIn(kGatePositionNames, spec.gate_position);
    }
    return {{"normalize", std::move(object)}};
  }
  const FeedForwardSpec& spec = std::get<FeedForwardLayer>(layer).spec;
  Json object = {{"form", NameIn(kFeedForwardFormNames, spec.form)},
                 {"activation", NameIn(kActivationNames, spec.activation.kind)},
                 {"layout", NameIn(kWeightLayoutNames, spec.layout)}};
  if (spec.activation.beta != 1) object["swish_beta"] = spec.activation.beta;
  if (spec.form == FeedForwardForm::kGated) object["packing"] = NameIn(kGateUpPackingNames, spec.packing);
  if (spec.gate_max) object["gate_max"] = *spec.gate_max;
  if (spec.up_limit) object["up_limit"] = *spec.up_limit;
  if (!IsPlainZero(spec.up_offset)) object["up_offset"] = spec.up_offset;
  if (spec.inner_norm) {
    object["inner_norm"] = {{"epsilon", spec.inner_norm->epsilon.value_or(kDefaultInnerNormEpsilon)}};
  }
  return {{"feed_forward", std::move(object)}};
}

absl::StatusOr<Layer> SpecFromJson(const Json& object) {
  const bool norm = object.is_object() && object.contains("normalize");
  const bool feed_forward = object.is_object() && object.contains("feed_forward");
  if (norm == feed_forward) {
    return Wrong("normalize", "expected either normalize or feed_forward, to say what the layer computes");
  }
  return norm ? NormalizeFromJson(object.at("normalize")) : FeedForwardFromJson(object.at("feed_forward"));
}

}  // namespace layerd
