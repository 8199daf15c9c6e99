#include "lib/weights/checkpoint.h"

#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"
#include "nlohmann/json.hpp"

namespace layerd {
namespace {

constexpr uint64_t kMaxConfigBytes = uint64_t{4} << 20;

absl::Status Unusable(std::string_view source, std::string_view reason, const std::string& text) {
  return InvalidField("file", absl::StrCat("CHECKPOINT_", std::string(reason)),
                      absl::StrCat(std::string(source), ": ", text));
}

// config.json's top-level strings and numbers; nested values are skipped.
struct Config {
  std::map<std::string, std::string> strings;
  std::map<std::string, double> numbers;

  const std::string* String(const std::string& key) const {
    const auto found = strings.find(key);
    return found == strings.end() ? nullptr : &found->second;
  }
  std::optional<double> Number(const std::string& key) const {
    const auto found = numbers.find(key);
    return found == numbers.end() ? std::nullopt : std::optional(found->second);
  }
};

// Collects a Config from nlohmann's events, returning false where the document is no object. Memory is bounded by the
// file's size; nesting is only counted.
class ConfigHandler {
 public:
  Config& config() { return config_; }

  bool start_object(size_t) { return ++depth_ > 0; }
  bool end_object() { return --depth_ >= 0; }
  bool start_array(size_t) { return depth_++ > 0; }
  bool end_array() { return --depth_ > 0; }
  bool key(std::string& key) {
    if (depth_ == 1) key_ = key;
    return true;
  }
  bool string(std::string& value) {
    if (depth_ == 1) config_.strings[key_] = value;
    return depth_ > 0;
  }
  bool number_integer(int64_t value) { return Number(static_cast<double>(value)); }
  bool number_unsigned(uint64_t value) { return Number(static_cast<double>(value)); }
  bool number_float(double value, const std::string&) { return Number(value); }
  bool boolean(bool) { return depth_ > 0; }
  bool null() { return depth_ > 0; }
  bool binary(std::vector<uint8_t>&) { return false; }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

 private:
  bool Number(double value) {
    if (depth_ == 1) config_.numbers[key_] = value;
    return depth_ > 0;
  }

  int64_t depth_ = 0;
  std::string key_;
  Config config_;
};

// The config.json beside `file`; an empty one where there is none.
absl::StatusOr<Config> ReadConfig(const SafetensorsFile& file) {
  const auto input = InputFile::Open(absl::StrCat(FolderOf(file.path()), "config.json"));
  if (!input.ok()) {
    if (input.status().code() == absl::StatusCode::kNotFound) return Config();
    return input.status();
  }
  if (input->size() > kMaxConfigBytes) {
    return Unusable(
        "config.json", "CONFIG",
        absl::StrCat("the file is too long: expected at most ", kMaxConfigBytes, " bytes, got ", input->size()));
  }
  std::string json(input->size(), ' ');
  const absl::Status read = input->ReadAt(0, absl::MakeSpan(reinterpret_cast<std::byte*>(json.data()), json.size()));
  if (!read.ok()) return read;
  ConfigHandler handler;
  // nlohmann takes a NUL for the end of the input.
  if (json.find('\0') != std::string::npos || !nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return Unusable("config.json", "CONFIG", "expected a JSON object");
  }
  return std::move(handler.config());
}

struct NamedActivation {
  const char* name;
  Activation kind;
};
constexpr std::array<NamedActivation, 11> kActivations = {{
    {"silu", Activation::kSilu},
    {"swish", Activation::kSilu},
    {"gelu", Activation::kGelu},
    {"gelu_new", Activation::kGeluTanh},
    {"gelu_pytorch_tanh", Activation::kGeluTanh},
    {"gelu_tanh", Activation::kGeluTanh},
    {"gelu_fast", Activation::kGeluTanh},
    {"quick_gelu", Activation::kQuickGelu},
    {"relu", Activation::kRelu},
    {"relu2", Activation::kReluSquared},
    {"sigmoid", Activation::kSigmoid},
}};

// Transformers' names of the activation; nothing where config.json names none.
absl::StatusOr<const NamedActivation*> FindActivation(const Config& config) {
  // Gemma's config.json has both of the first two, and the models follow the first.
  for (const char* key : {"hidden_activation", "hidden_act", "activation_function"}) {
    const std::string* name = config.String(key);
    if (name == nullptr) continue;
    const std::string* family = config.String("model_type");
    // The first Gemma files say "gelu" and mean the tanh form, which is what the models compute.
    const bool first_gemma = family != nullptr && *family == "gemma" && *name == "gelu";
    for (const NamedActivation& known : kActivations) {
      if (known.name == (first_gemma ? "gelu_tanh" : *name)) return &known;
    }
    std::string names;
    for (const NamedActivation& known : kActivations) absl::StrAppend(&names, names.empty() ? "" : ", ", known.name);
    return Unusable("config.json", "ACTIVATION",
                    absl::StrCat(key, ": expected one of ", names, "; got ", Quoted(*name)));
  }
  return nullptr;
}

absl::StatusOr<std::optional<double>> FindEpsilon(const Config& config, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const std::optional<double> value = config.Number(key);
    if (!value) continue;
    if (!std::isfinite(*value) || *value < 0) {
      return Unusable("config.json", "EPSILON", absl::StrCat(key, ": expected a number of 0 or more, got ", *value));
    }
    return value;
  }
  return std::optional<double>();
}

struct FormNames {
  FeedForwardForm form;
  GateUpPacking packing;
  WeightLayout layout;
  // Parts of the tensors' names; null: the form has no such matrix.
  const char* gate;
  const char* up;
  const char* gate_up;
  const char* down;

  std::vector<const char*> Parts() const {
    std::vector<const char*> parts;
    for (const char* part : {gate, up, gate_up, down}) {
      if (part != nullptr) parts.push_back(part);
    }
    return parts;
  }
};

constexpr auto kGated = FeedForwardForm::kGated;
constexpr auto kPlain = FeedForwardForm::kPlain;
constexpr auto kSeparate = GateUpPacking::kSeparate;
constexpr auto kHalves = GateUpPacking::kHalves;
constexpr auto kInOut = WeightLayout::kInOut;
constexpr auto kOutIn = WeightLayout::kOutIn;
constexpr std::array<FormNames, 7> kForms = {{
    {kGated, kSeparate, kOutIn, "gate_proj", "up_proj", nullptr, "down_proj"},
    {kGated, kSeparate, kOutIn, "w1", "w3", nullptr, "w2"},
    {kGated, kHalves, kOutIn, nullptr, nullptr, "gate_up_proj", "down_proj"},
    {kPlain, kSeparate, kInOut, nullptr, "c_fc", nullptr, "c_proj"},
    {kPlain, kSeparate, kOutIn, nullptr, "dense_h_to_4h", nullptr, "dense_4h_to_h"},
    {kPlain, kSeparate, kOutIn, nullptr, "fc1", nullptr, "fc2"},
    {kPlain, kSeparate, kOutIn, nullptr, "intermediate.dense", nullptr, "output.dense"},
}};

std::string_view WithoutDot(std::string_view prefix) {
  if (!prefix.empty() && prefix.back() == '.') prefix.remove_suffix(1);
  return prefix;
}

std::string Join(std::string_view prefix, std::string_view part) {
  return prefix.empty() ? std::string(part) : absl::StrCat(std::string(prefix), ".", std::string(part));
}

// The prefix of `name` before `.part`; nothing where it does not end so.
std::optional<std::string> PrefixBefore(std::string_view name, std::string_view part) {
  if (name.size() < part.size() || name.substr(name.size() - part.size()) != part) return std::nullopt;
  name.remove_suffix(part.size());
  if (name.empty()) return std::string();
  if (name.back() != '.') return std::nullopt;
  return std::string(name.substr(0, name.size() - 1));
}

absl::Status NoSuchLayer(std::string_view source, std::string_view what, std::string_view prefix,
                         const std::set<std::string>& existing) {
  constexpr size_t kShown = 4;
  std::string list;
  size_t shown = 0;
  for (const std::string& one : existing) {
    if (shown++ == kShown) break;
    absl::StrAppend(&list, list.empty() ? "" : ", ", Quoted(one));
  }
  if (existing.size() > kShown) absl::StrAppend(&list, " and ", existing.size() - kShown, " more");
  ErrorDetails details;
  details.reason = "NO_SUCH_LAYER";
  details.field = "file";
  details.resource_type = "layer";
  details.resource_name = Shortened(prefix);
  return WithDetails(
      absl::StatusCode::kNotFound,
      absl::StrCat("file: ", std::string(source), ": there is no ", std::string(what), " ", Quoted(prefix), "; ",
                   list.empty() ? "the file has none with names that are known" : "the file has ", list),
      details);
}

// The form whose matrices are all there.
absl::StatusOr<const FormNames*> FindForm(const SafetensorsFile& file, std::string_view prefix) {
  const std::string source = Quoted(BaseName(file.path()));
  const FormNames* complete = nullptr;
  std::string present, missing;  // of the form that is nearest to complete
  size_t most = 0;
  for (const FormNames& form : kForms) {
    std::string has, lacks;
    size_t count = 0;
    for (const char* part : form.Parts()) {
      const std::string name = Join(prefix, absl::StrCat(part, ".weight"));
      if (file.Find(name) != nullptr) {
        has = name;
        ++count;
      } else if (lacks.empty()) {
        lacks = name;
      }
    }
    if (lacks.empty()) {
      if (complete != nullptr) {
        return Unusable(source, "AMBIGUOUS",
                        absl::StrCat("layer ", Quoted(prefix), " has both ", complete->Parts().front(), " and ",
                                     form.Parts().front(), "; expected the names of one form"));
      }
      complete = &form;
    }
    if (count > most) {
      most = count;
      present = has;
      missing = lacks;
    }
  }
  if (complete != nullptr) return complete;
  if (most > 0) {
    return Unusable(source, "INCOMPLETE",
                    absl::StrCat("layer ", Quoted(prefix), " is incomplete: it has ", Quoted(present), " but no ",
                                 Quoted(missing)));
  }
  std::set<std::string> existing;
  for (const auto& [name, entry] : file.tensors()) {
    for (const FormNames& form : kForms) {
      auto found = PrefixBefore(name, absl::StrCat(form.Parts().front(), ".weight"));
      if (found) existing.insert(*std::move(found));
    }
  }
  return NoSuchLayer(source, "feed-forward layer", prefix, existing);
}

absl::Status CheckShape(const SafetensorsFile& file, const std::string& name, const Shape& expected,
                        const std::string& fit) {
  const SafetensorsEntry* entry = file.Find(name);
  if (entry == nullptr || entry->shape == expected) return absl::OkStatus();
  return Unusable(Quoted(BaseName(file.path())), "SHAPE",
                  absl::StrCat("tensor ", Quoted(name), ": expected the shape ", ToString(expected), " to fit ",
                               Quoted(fit), ", got ", ToString(entry->shape)));
}

// A tensor that a layer has or may have, and where it goes.
struct Slot {
  std::string name;
  Shape shape;
  std::optional<Tensor>* target;
};

}  // namespace

absl::StatusOr<CheckpointFeedForward> ReadFeedForward(const SafetensorsFile& file, std::string_view prefix) {
  prefix = WithoutDot(prefix);
  const auto found = FindForm(file, prefix);
  if (!found.ok()) return found.status();
  const FormNames& form = **found;
  const auto config = ReadConfig(file);
  if (!config.ok()) return config.status();
  const auto activation = FindActivation(*config);
  if (!activation.ok()) return activation.status();

  CheckpointFeedForward layer;
  layer.spec.form = form.form;
  layer.spec.packing = form.packing;
  layer.spec.layout = form.layout;
  layer.activation_known = *activation != nullptr;
  if (layer.activation_known) layer.spec.activation = ActivationFunction{(*activation)->kind};

  // The first matrix gives d and h; the others must fit it.
  const auto weight = [&](const char* part) { return Join(prefix, absl::StrCat(part, ".weight")); };
  const auto bias = [&](const char* part) { return Join(prefix, absl::StrCat(part, ".bias")); };
  const bool out_in = form.layout == WeightLayout::kOutIn;
  const std::string source = Quoted(BaseName(file.path()));
  const char* widening = form.gate_up != nullptr ? form.gate_up : form.up;
  const auto shape_of = [&](const char* part) -> absl::StatusOr<std::pair<int64_t, int64_t>> {  // out, in
    const Shape& shape = file.Find(weight(part))->shape;
    if (shape.size() != 2) {
      return Unusable(source, "SHAPE",
                      absl::StrCat("tensor ", Quoted(weight(part)), ": expected 2 dimensions, got ", ToString(shape)));
    }
    return out_in ? std::pair(shape[0], shape[1]) : std::pair(shape[1], shape[0]);
  };
  const auto widening_shape = shape_of(widening);
  if (!widening_shape.ok()) return widening_shape.status();
  const auto down_shape = shape_of(form.down);
  if (!down_shape.ok()) return down_shape.status();
  const auto [widening_out, dim] = *widening_shape;
  if (form.gate_up != nullptr && widening_out % 2 != 0) {
    return Unusable(source, "SHAPE",
                    absl::StrCat("tensor ", Quoted(weight(widening)),
                                 ": expected an even number of outputs (gate and up), got ", widening_out));
  }
  const int64_t hidden_dim = form.gate_up != nullptr ? widening_out / 2 : widening_out;
  const int64_t out_dim = down_shape->first;
  const auto matrix = [&](int64_t out, int64_t in) { return out_in ? Shape{out, in} : Shape{in, out}; };

  std::vector<Slot> slots;
  const auto add = [&](const char* part, int64_t out, int64_t in, std::optional<Tensor>* to,
                       std::optional<Tensor>* bias_to) {
    if (part == nullptr) return;
    slots.push_back({weight(part), matrix(out, in), to});
    slots.push_back({bias(part), Shape{out}, bias_to});
  };
  FeedForwardWeights& weights = layer.weights;
  add(form.gate, hidden_dim, dim, &weights.gate, &weights.gate_bias);
  add(form.up, hidden_dim, dim, &weights.up, &weights.up_bias);
  add(form.gate_up, widening_out, dim, &weights.gate_up, &weights.gate_up_bias);
  add(form.down, out_dim, hidden_dim, &weights.down, &weights.down_bias);
  slots.push_back({Join(prefix, "ffn_sub_norm.weight"), Shape{hidden_dim}, &weights.inner_norm_gamma});
  for (const Slot& slot : slots) {
    const absl::Status fits = CheckShape(file, slot.name, slot.shape, weight(widening));
    if (!fits.ok()) return fits;
  }
  for (const Slot& slot : slots) {
    if (file.Find(slot.name) == nullptr) continue;
    auto tensor = file.Read(slot.name);
    if (!tensor.ok()) return tensor.status();
    *slot.target = *std::move(tensor);
  }
  if (weights.inner_norm_gamma) {
    const auto epsilon = FindEpsilon(*config, {"rms_norm_eps", "norm_eps"});
    if (!epsilon.ok()) return epsilon.status();
    layer.spec.inner_norm = InnerNorm{*epsilon};
  }

  std::string parts;
  for (const char* part : form.Parts()) absl::StrAppend(&parts, parts.empty() ? "" : ", ", part);
  layer.description = absl::StrCat(
      form.form == FeedForwardForm::kGated ? "gated: " : "plain: ", parts, out_in ? " [out, in]" : " [in, out]",
      weights.down_bias ? ", biases" : "", weights.inner_norm_gamma ? ", inner norm" : "", "; ",
      layer.activation_known ? (*activation)->name : "activation not told", "; d ", dim, ", h ", hidden_dim);
  return layer;
}

absl::StatusOr<CheckpointNorm> ReadNorm(const SafetensorsFile& file, std::string_view prefix) {
  prefix = WithoutDot(prefix);
  const std::string source = Quoted(BaseName(file.path()));
  // Of two spellings, the one that is there; both at once would leave open which is meant.
  const auto choose = [&](const char* a, const char* b) -> absl::StatusOr<std::string> {
    const std::string first = Join(prefix, a), second = Join(prefix, b);
    const bool has_first = file.Find(first) != nullptr, has_second = file.Find(second) != nullptr;
    if (has_first && has_second) {
      return Unusable(source, "AMBIGUOUS",
                      absl::StrCat("norm ", Quoted(prefix), " has both ", a, " and ", b, "; expected one"));
    }
    return has_first ? first : has_second ? second : std::string();
  };
  const auto gamma_name = choose("weight", "gamma");
  if (!gamma_name.ok()) return gamma_name.status();
  const auto beta_name = choose("bias", "beta");
  if (!beta_name.ok()) return beta_name.status();
  if (gamma_name->empty() && !beta_name->empty()) {
    return Unusable(source, "INCOMPLETE",
                    absl::StrCat("norm ", Quoted(prefix), " is incomplete: it has ", Quoted(*beta_name), " but no ",
                                 Quoted(Join(prefix, "weight"))));
  }
  if (gamma_name->empty()) {
    std::set<std::string> existing;
    for (const auto& [name, entry] : file.tensors()) {
      for (const char* part : {"weight", "gamma"}) {
        auto found = PrefixBefore(name, part);
        if (found && entry.shape.size() == 1) existing.insert(*std::move(found));
      }
    }
    return NoSuchLayer(source, "norm", prefix, existing);
  }
  const Shape& shape = file.Find(*gamma_name)->shape;
  if (shape.size() != 1) {
    return Unusable(
        source, "SHAPE",
        absl::StrCat("tensor ", Quoted(*gamma_name), ": expected 1 dimension, as a norm has, got ", ToString(shape)));
  }
  if (!beta_name->empty()) {
    const absl::Status fits = CheckShape(file, *beta_name, shape, *gamma_name);
    if (!fits.ok()) return fits;
  }

  const auto config = ReadConfig(file);
  if (!config.ok()) return config.status();
  const auto layer_norm_eps = FindEpsilon(*config, {"layer_norm_eps", "layer_norm_epsilon"});
  if (!layer_norm_eps.ok()) return layer_norm_eps.status();
  const auto rms_norm_eps = FindEpsilon(*config, {"rms_norm_eps"});
  if (!rms_norm_eps.ok()) return rms_norm_eps.status();
  const auto norm_eps = FindEpsilon(*config, {"norm_eps"});
  if (!norm_eps.ok()) return norm_eps.status();

  CheckpointNorm norm;
  auto gamma = file.Read(*gamma_name);
  if (!gamma.ok()) return gamma.status();
  norm.gamma = *std::move(gamma);
  if (!beta_name->empty()) {
    auto beta = file.Read(*beta_name);
    if (!beta.ok()) return beta.status();
    norm.beta = *std::move(beta);
  }
  // Without β, an eps of each kind in one config.json tells nothing.
  if (norm.beta || (*layer_norm_eps && !*rms_norm_eps)) {
    norm.kind = NormKind::kLayerNorm;
    norm.epsilon = *layer_norm_eps ? *layer_norm_eps : *norm_eps;
  } else if (*rms_norm_eps && !*layer_norm_eps) {
    norm.kind = NormKind::kRmsNorm;
    norm.epsilon = *rms_norm_eps;
  } else if (!*rms_norm_eps) {
    norm.epsilon = *norm_eps;
  }
  norm.description =
      absl::StrCat(!norm.kind                           ? "kind of norm not told"
                   : *norm.kind == NormKind::kLayerNorm ? "LayerNorm"
                                                        : "RMSNorm",
                   norm.beta ? ", bias" : "", "; ", norm.epsilon ? absl::StrCat("eps ", *norm.epsilon) : "eps not told",
                   "; d ", shape[0]);
  return norm;
}

}  // namespace layerd
