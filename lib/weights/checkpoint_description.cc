#include "lib/weights/checkpoint_description.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/spec_json.h"

namespace layerd {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxDescriptionBytes = uint64_t{1} << 20;
constexpr size_t kMaxEntries = 1000;
constexpr size_t kMaxDigits = 9;
constexpr char kReason[] = "CHECKPOINT_DESCRIPTION";
constexpr char kNumber[] = "{i}";

std::string Shown(const Json& value) {
  return Shortened(value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace));
}

// A name in which {i} may stand for a number.
struct Pattern {
  std::string before;
  std::optional<std::string> after;  // after {i}; nothing where there is no {i}

  std::string With(const std::string& number) const { return after ? absl::StrCat(before, number, *after) : before; }
};

struct Entry {
  std::string path;  // "layers[3]"
  Pattern name;
  Layer layer;
  std::map<std::string, Pattern> weights;  // by role
  std::string first;                       // the role whose tensors tell the numbers
};

absl::StatusOr<Pattern> ReadPattern(const Json& value, const std::string& path) {
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
    return WrongDescription(absl::StrCat(path, ": expected a name, got ", Shown(value)));
  }
  const auto& text = value.get_ref<const std::string&>();
  const size_t place = text.find(kNumber);
  if (place == std::string::npos) return Pattern{.before = text};
  Pattern pattern{.before = text.substr(0, place), .after = text.substr(place + sizeof(kNumber) - 1)};
  if (absl::StrContains(*pattern.after, kNumber)) {
    return WrongDescription(absl::StrCat(path, ": expected {i} once, got ", Quoted(text)));
  }
  return pattern;
}

// The weight that every layer with these options has.
std::string FirstRole(const Layer& layer) {
  const auto* feed_forward = std::get_if<FeedForwardLayer>(&layer);
  if (feed_forward == nullptr) return "gamma";
  if (feed_forward->spec.form == FeedForwardForm::kPlain) return "up";
  return feed_forward->spec.packing == GateUpPacking::kSeparate ? "gate" : "gate_up";
}

absl::Status ReadWeights(const Json& weights, Entry& entry) {
  const std::string path = absl::StrCat(entry.path, ".weights");
  if (!weights.is_object()) return WrongDescription(absl::StrCat(path, ": expected an object, got ", Shown(weights)));
  Layer scratch = entry.layer;  // only to ask which roles there are
  for (const auto& [role, value] : weights.items()) {
    const auto known = SetWeight(scratch, role, Tensor::WithoutData(DType::kFloat32, {1}));
    if (!known.ok()) return WrongDescription(absl::StrCat(entry.path, ".", std::string(known.message())));
    auto pattern = ReadPattern(value, absl::StrCat(path, ".", role));
    if (!pattern.ok()) return pattern.status();
    if (pattern->after.has_value() != entry.name.after.has_value()) {
      return WrongDescription(absl::StrCat(path, ".", role, ": expected ", entry.name.after ? "{i}" : "no {i}",
                                           ", as in the layer's name, got ", Shown(value)));
    }
    entry.weights.emplace(role, *std::move(pattern));
  }
  if (entry.weights.count(entry.first) == 0) {
    return WrongDescription(absl::StrCat(path, ".", entry.first, ": expected the name of a tensor, got nothing"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Entry> ReadEntry(const Json& object, const std::string& path) {
  Entry entry{.path = path};
  if (!object.is_object()) return WrongDescription(absl::StrCat(path, ": expected an object, got ", Shown(object)));
  for (const auto& [key, value] : object.items()) {
    if (key != "layer" && key != "normalize" && key != "feed_forward" && key != "weights") {
      return WrongDescription(
          absl::StrCat(path, ": expected the keys layer, weights, and normalize or feed_forward, got ", Quoted(key)));
    }
  }
  for (const char* key : {"layer", "weights"}) {
    if (!object.contains(key)) return WrongDescription(absl::StrCat(path, ".", key, ": expected it, got nothing"));
  }
  auto name = ReadPattern(object.at("layer"), absl::StrCat(path, ".layer"));
  if (!name.ok()) return name.status();
  entry.name = *std::move(name);
  auto layer = SpecFromJson(object);
  if (!layer.ok()) return WrongDescription(absl::StrCat(path, ".", std::string(layer.status().message())));
  entry.layer = *std::move(layer);
  entry.first = FirstRole(entry.layer);
  if (auto status = ReadWeights(object.at("weights"), entry); !status.ok()) return status;
  return entry;
}

// The numbers for which `pattern` names a tensor; one empty number where it has no {i} and names one.
std::vector<std::string> NumbersOf(const Pattern& pattern, const TensorMap& tensors) {
  std::vector<std::string> numbers;
  if (!pattern.after) {
    if (tensors.count(pattern.before) > 0) numbers.emplace_back();
    return numbers;
  }
  for (auto at = tensors.lower_bound(pattern.before); at != tensors.end(); ++at) {
    absl::string_view rest = at->first;
    if (!absl::StartsWith(rest, pattern.before)) break;
    rest.remove_prefix(pattern.before.size());
    if (rest.size() <= pattern.after->size() || !absl::EndsWith(rest, *pattern.after)) continue;
    rest.remove_suffix(pattern.after->size());
    bool digits = rest.size() <= kMaxDigits;
    for (const char c : rest) digits = digits && absl::ascii_isdigit(static_cast<unsigned char>(c));
    if (digits) numbers.emplace_back(rest);
  }
  return numbers;
}

absl::Status AddLayers(const Entry& entry, const TensorMap& tensors, bool may_match_nothing, LayerDrafts& drafts) {
  const Pattern& first = entry.weights.at(entry.first);
  const std::vector<std::string> numbers = NumbersOf(first, tensors);
  if (numbers.empty() && !may_match_nothing) {
    return WrongDescription(
        absl::StrCat(entry.path, ".weights.", entry.first, ": expected the name of a tensor that exists",
                     first.after ? ", with a number for {i}" : "", ", got ", Quoted(first.With(kNumber))));
  }
  for (const std::string& number : numbers) {
    const std::string name = entry.name.With(number);
    if (!IsNamePart(name)) {
      return WrongDescription(absl::StrCat(entry.path,
                                           ".layer: expected letters, digits, '.', '_' and '-', no dot first, "
                                           "and at most ",
                                           kMaxNamePartBytes, " bytes; got ", Quoted(name)));
    }
    LayerDraft draft{.layer = entry.layer, .entry = entry.path};
    draft.inferred.push_back({"options", "as described", absl::StrCat(kDescriptionFile, ": ", entry.path)});
    for (const auto& [role, pattern] : entry.weights) draft.tensors[role] = pattern.With(number);
    if (!drafts.emplace(name, std::move(draft)).second) {
      return WrongDescription(absl::StrCat(entry.path, ".layer: another entry describes ", Quoted(name), " too"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WrongDescription(std::string_view text) {
  return InvalidField("file", kReason, absl::StrCat(Quoted(kDescriptionFile), ": ", std::string(text)));
}

absl::StatusOr<LayerDrafts> DescribedLayers(const CheckpointFolder& folder, const TensorMap& tensors,
                                            bool may_match_nothing) {
  LayerDrafts drafts;
  const auto text = folder.ReadText(kDescriptionFile, kMaxDescriptionBytes, kReason);
  if (!text.ok()) return text.status();
  if (!*text) return drafts;
  const auto json = ParseJson(**text, Quoted(kDescriptionFile), kReason);
  if (!json.ok()) return json.status();
  if (!json->is_object() || json->size() != 1 || !json->contains("layers") || !json->at("layers").is_array()) {
    return WrongDescription("expected an object with a list \"layers\" and nothing else");
  }
  const Json& layers = json->at("layers");
  if (layers.size() > kMaxEntries) {
    return WrongDescription(absl::StrCat("layers: expected at most ", kMaxEntries, " entries, got ", layers.size()));
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto entry = ReadEntry(layers[i], absl::StrCat("layers[", i, "]"));
    if (!entry.ok()) return entry.status();
    if (auto status = AddLayers(*entry, tensors, may_match_nothing, drafts); !status.ok()) return status;
  }
  return drafts;
}

}  // namespace layerd
