#include "lib/weights/layer_inference.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "lib/weights/families.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

constexpr char kByNames[] = "tensor names";
constexpr char kByCaller[] = "the caller";

std::string ByFamily(const Family& family) { return absl::StrCat("family ", family.model_type); }

// "layers.{i}.mlp.experts.{i}" for "layers.3.mlp.experts.0".
std::string Generalized(const std::string& path) {
  std::vector<std::string> parts = absl::StrSplit(path, '.');
  for (std::string& part : parts) {
    if (!part.empty() && std::all_of(part.begin(), part.end(), absl::ascii_isdigit)) part = "{i}";
  }
  return absl::StrJoin(parts, ".");
}

// The full paths that a family's `paths` stand for.
std::set<std::string> FullPaths(const Family& family, const char* paths) {
  std::set<std::string> full;
  for (const absl::string_view root : absl::StrSplit(family.roots, ' ', absl::SkipEmpty())) {
    for (const absl::string_view path : absl::StrSplit(paths, ' ', absl::SkipEmpty())) {
      full.insert(absl::StrCat(root == "." ? "" : root, path));
    }
  }
  return full;
}

// The path before `.part`; nothing where `name` does not end so, or has nothing before it.
std::optional<std::string> PathBefore(const std::string& name, const std::string& part) {
  if (name.size() < part.size() + 2 || !absl::EndsWith(name, part)) return std::nullopt;
  const size_t dot = name.size() - part.size() - 1;
  return name[dot] == '.' ? std::optional(name.substr(0, dot)) : std::nullopt;
}

std::string Weight(const std::string& path, const char* part) { return absl::StrCat(path, ".", part, ".weight"); }
std::string Bias(const std::string& path, const char* part) { return absl::StrCat(path, ".", part, ".bias"); }

// Writes down where a draft's options are from, and which of them stay open.
class Options {
 public:
  explicit Options(LayerDraft& draft) : draft_(draft) {}

  void Infer(std::string option, std::string value, std::string source) {
    draft_.inferred.push_back({std::move(option), std::move(value), std::move(source)});
  }
  void LeaveOpen(const std::string& option, absl::string_view why = "") {
    open_.push_back(why.empty() ? option : absl::StrCat(option, " (", why, ")"));
  }
  void Finish() {
    if (open_.empty() || !draft_.status.ok()) return;
    draft_.status =
        UnusableLayer("LAYER_OPTIONS_OPEN",
                      absl::StrCat("the files leave open: ", absl::StrJoin(open_, ", "), "; layerd.json may tell"));
  }

 private:
  LayerDraft& draft_;
  std::vector<std::string> open_;
};

class LayerFinder {
 public:
  LayerFinder(const TensorMap& tensors, const ModelConfig& config, const CheckpointHints& hints)
      : tensors_(tensors), config_(config), hints_(hints), family_(config.family()) {
    if (family_ == nullptr) return;
    norm_paths_ = FullPaths(*family_, family_->norms);
    fixed_epsilon_paths_ = FullPaths(*family_, family_->fixed_epsilon_norms);
    feed_forward_paths_ = FullPaths(*family_, family_->feed_forwards);
  }

  LayerDrafts Find() {
    LayerDrafts drafts;
    const auto add = [&](std::string name, LayerDraft draft) {
      if (IsNamePart(name)) drafts.emplace(std::move(name), std::move(draft));
    };
    for (const std::string& path : FeedForwardModules()) {
      absl::Status status;
      const FeedForwardNames* names = nullptr;
      bool known = feed_forward_paths_.count(Generalized(path)) > 0;
      if (known) names = NearestForm(path, absl::MakeConstSpan(family_->names, 1), status);
      known = names != nullptr;
      if (!known) names = NearestForm(path, WellKnownFeedForwardNames(), status);
      if (names != nullptr) add(absl::StrCat(path, names->name_suffix), FeedForward(path, *names, known, status));
    }
    for (const std::string& path : NormModules()) {
      const std::string general = Generalized(path);
      const bool fixed_epsilon = fixed_epsilon_paths_.count(general) > 0;
      if (fixed_epsilon || norm_paths_.count(general) > 0) {
        add(path, Norm(path, family_, fixed_epsilon));
      } else if (LooksLikeNorm(path)) {
        add(path, Norm(path, nullptr, false));
      }
    }
    return drafts;
  }

 private:
  bool Has(const std::string& name) const { return tensors_.count(name) > 0; }

  // Null where it is not known.
  const Shape* ShapeOf(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() || found->second.entry == nullptr ? nullptr : &found->second.entry->shape;
  }

  // Whether config.json speaks for a layer that no family knows.
  bool ConfigSpeaksForOthers() const { return family_ == nullptr && config_.describes_one_model(); }

  // Modules with a matrix that leads to h: one that only has a `down` may be something else (attention's output).
  std::set<std::string> FeedForwardModules() const {
    std::set<std::string> parts;
    for (const FeedForwardNames& names : WellKnownFeedForwardNames()) AddWidening(names, parts);
    if (family_ != nullptr) AddWidening(*family_->names, parts);
    std::set<std::string> modules;
    for (const auto& [name, tensor] : tensors_) {
      for (const std::string& part : parts) {
        if (auto path = PathBefore(name, part)) modules.insert(*std::move(path));
      }
    }
    return modules;
  }

  static void AddWidening(const FeedForwardNames& names, std::set<std::string>& parts) {
    for (const char* part : {names.gate, names.up, names.gate_up}) {
      if (part != nullptr) parts.insert(absl::StrCat(part, ".weight"));
    }
  }

  bool Widens(const std::string& path, const FeedForwardNames& names) const {
    for (const char* part : {names.gate, names.up, names.gate_up}) {
      if (part != nullptr && Has(Weight(path, part))) return true;
    }
    return false;
  }

  std::set<std::string> NormModules() const {
    std::set<std::string> modules;
    for (const auto& [name, tensor] : tensors_) {
      for (const char* part : {"weight", "gamma", "bias", "beta"}) {
        if (auto path = PathBefore(name, part)) modules.insert(*std::move(path));
      }
    }
    return modules;
  }

  // By its tensors alone: γ is a vector. Where a damaged file leaves its shape unknown, the module's name must do.
  bool LooksLikeNorm(const std::string& path) const {
    for (const char* part : {"weight", "gamma"}) {
      const std::string name = absl::StrCat(path, ".", part);
      if (!Has(name)) continue;
      if (const Shape* shape = ShapeOf(name)) return shape->size() == 1;
      const std::string last = absl::AsciiStrToLower(path.substr(path.rfind('.') + 1));
      return absl::StrContains(last, "norm") || absl::StartsWith(last, "ln");
    }
    return false;
  }

  LayerDraft Norm(const std::string& path, const Family* family, bool fixed_epsilon) const {
    LayerDraft draft;
    const auto take = [&](const char* role, const char* a, const char* b) {
      const std::string first = absl::StrCat(path, ".", a), second = absl::StrCat(path, ".", b);
      if (Has(first) && Has(second)) {
        draft.status = UnusableLayer("LAYER_AMBIGUOUS",
                                     absl::StrCat("expected ", Quoted(first), " or ", Quoted(second), ", got both"));
      }
      if (Has(first) || Has(second)) draft.tensors[role] = Has(first) ? first : second;
    };
    take("gamma", "weight", "gamma");
    take("beta", "bias", "beta");
    if (draft.tensors.count("gamma") == 0) {
      draft.status = UnusableLayer("LAYER_INCOMPLETE", absl::StrCat("there is ", Quoted(draft.tensors["beta"]),
                                                                    " but no ", Quoted(path + ".weight")));
    }
    NormalizeLayer norm;
    Options options(draft);
    NormalizeOptions(family, fixed_epsilon, draft.tensors.count("beta") > 0, norm.spec, options);
    options.Finish();
    draft.layer = std::move(norm);
    return draft;
  }

  void NormalizeOptions(const Family* family, bool fixed_epsilon, bool has_beta, NormalizeSpec& spec,
                        Options& options) const {
    const auto kind = KindOf(family, has_beta);
    if (kind) {
      spec.kind = kind->value;
      options.Infer("kind", NameIn(kNormKindNames, spec.kind), kind->source);
    } else {
      options.LeaveOpen("kind");
    }
    // A family speaks of its own kind of norm only, and so do the names of the keys in config.json.
    if (family != nullptr && (!kind || kind->value != family->kind)) family = nullptr;
    NormEpsilon(family, fixed_epsilon, kind, spec, options);

    if (hints_.norm_rounding) {
      spec.rounding = *hints_.norm_rounding;
      options.Infer("rounding", NameIn(kNormRoundingNames, spec.rounding), kByCaller);
    } else if (family != nullptr) {
      spec.rounding = family->rounding;
      options.Infer("rounding", NameIn(kNormRoundingNames, spec.rounding), ByFamily(*family));
    } else if (kind && kind->value == NormKind::kLayerNorm) {
      spec.rounding = NormRounding::kAfterGamma;
      options.Infer("rounding", NameIn(kNormRoundingNames, spec.rounding), "default of layer_norm");
    } else {
      options.LeaveOpen("rounding");
    }
    if (family != nullptr && family->gamma_offset != 0) {
      spec.gamma_offset = family->gamma_offset;
      options.Infer("gamma_offset", ShownNumber(spec.gamma_offset), ByFamily(*family));
    }
  }

  std::optional<Sourced<NormKind>> KindOf(const Family* family, bool has_beta) const {
    if (hints_.norm_kind) return Sourced<NormKind>{*hints_.norm_kind, kByCaller};
    if (family != nullptr) return Sourced<NormKind>{family->kind, ByFamily(*family)};
    if (has_beta) return Sourced<NormKind>{NormKind::kLayerNorm, kByNames};
    if (!ConfigSpeaksForOthers()) return std::nullopt;
    const auto rms = config_.Epsilon("rms_norm_eps"), layer = config_.Epsilon("layer_norm_eps layer_norm_epsilon");
    const bool has_rms = !rms.ok() || rms->has_value(), has_layer = !layer.ok() || layer->has_value();
    if (has_rms == has_layer) return std::nullopt;
    const auto& told = has_rms ? rms : layer;
    return Sourced<NormKind>{has_rms ? NormKind::kRmsNorm : NormKind::kLayerNorm,
                             told.ok() ? (*told)->source : kConfigFile};
  }

  void NormEpsilon(const Family* family, bool fixed, const std::optional<Sourced<NormKind>>& kind, NormalizeSpec& spec,
                   Options& options) const {
    if (hints_.norm_epsilon) {
      spec.epsilon = *hints_.norm_epsilon;
      options.Infer("epsilon", ShownNumber(*spec.epsilon), kByCaller);
      return;
    }
    const char* keys = "";
    if (family != nullptr) {
      keys = fixed ? "" : family->epsilon_keys;
    } else if (ConfigSpeaksForOthers()) {
      keys = !kind                                 ? "norm_eps"
             : kind->value == NormKind::kLayerNorm ? "layer_norm_eps layer_norm_epsilon norm_eps"
                                                   : "rms_norm_eps norm_eps";
    }
    spec.epsilon = EpsilonFrom(keys, family, "epsilon", options);
  }

  std::optional<double> EpsilonFrom(const char* keys, const Family* family, const char* option,
                                    Options& options) const {
    const auto told = config_.Epsilon(keys);
    if (!told.ok()) {
      options.LeaveOpen(option, told.status().message());
    } else if (*told) {
      options.Infer(option, ShownNumber((*told)->value), (*told)->source);
      return (*told)->value;
    } else if (family != nullptr) {
      options.Infer(option, ShownNumber(family->epsilon), absl::StrCat("default of ", family->model_type));
      return family->epsilon;
    } else {
      options.LeaveOpen(option);
    }
    return std::nullopt;
  }

  // The layer in the module `path` with matrices of these names; `known`: its family knows it.
  LayerDraft FeedForward(const std::string& path, const FeedForwardNames& names, bool known,
                         absl::Status status) const {
    LayerDraft draft{.status = std::move(status)};
    FeedForwardLayer layer;
    FeedForwardSpec& spec = layer.spec;
    const std::string source = known ? ByFamily(*family_) : kByNames;
    Options options(draft);
    spec.form = names.form;
    options.Infer("form", NameIn(kFeedForwardFormNames, spec.form), source);
    if (spec.form == FeedForwardForm::kGated) {
      spec.packing = names.packing;
      options.Infer("packing", NameIn(kGateUpPackingNames, spec.packing), source);
    }
    const auto layout = names.layout ? names.layout : LayoutByBias(path, names);
    if (layout) {
      spec.layout = *layout;
      options.Infer("layout", NameIn(kWeightLayoutNames, spec.layout), names.layout ? source : "shape of the bias");
    } else {
      options.LeaveOpen("layout");
    }
    InferActivation(known, spec, options);

    const std::array<std::pair<const char*, const char*>, 4> matrices = {
        {{"gate", names.gate}, {"up", names.up}, {"gate_up", names.gate_up}, {"down", names.down}}};
    for (const auto& [role, part] : matrices) {
      if (part == nullptr) continue;
      draft.tensors[role] = Weight(path, part);
      if (Has(Bias(path, part))) draft.tensors[absl::StrCat(role, "_bias")] = Bias(path, part);
    }
    if (names.inner_norm != nullptr && Has(Weight(path, names.inner_norm))) {
      draft.tensors["inner_norm_gamma"] = Weight(path, names.inner_norm);
      const char* keys = known ? family_->epsilon_keys : ConfigSpeaksForOthers() ? "rms_norm_eps norm_eps" : "";
      spec.inner_norm = InnerNorm{EpsilonFrom(keys, known ? family_ : nullptr, "inner_norm.epsilon", options)};
    }
    options.Finish();
    draft.layer = std::move(layer);
    return draft;
  }

  // Of `candidates`, the one whose matrices are all there, or most of them; `status` says what is missing, or that there
  // are two. Null where none has a matrix that leads to h.
  const FeedForwardNames* NearestForm(const std::string& path, absl::Span<const FeedForwardNames> candidates,
                                      absl::Status& status) const {
    const FeedForwardNames* nearest = nullptr;
    size_t most = 0;
    bool complete = false;
    for (const FeedForwardNames& names : candidates) {
      std::string present, missing;
      size_t count = 0;
      for (const char* part : {names.gate, names.up, names.gate_up, names.down}) {
        if (part == nullptr) continue;
        const std::string name = Weight(path, part);
        if (Has(name)) {
          present = name;
          ++count;
        } else if (missing.empty()) {
          missing = name;
        }
      }
      if (!Widens(path, names)) continue;
      if (missing.empty() && complete) {
        status =
            UnusableLayer("LAYER_AMBIGUOUS",
                          absl::StrCat("there are the matrices of two layers: ", Quoted(Weight(path, nearest->down)),
                                       " and ", Quoted(Weight(path, names.down))));
      } else if (missing.empty() || (!complete && count > most)) {
        nearest = &names;
        most = count;
        complete = missing.empty();
        status = complete ? absl::OkStatus()
                          : UnusableLayer("LAYER_INCOMPLETE",
                                          absl::StrCat("there is ", Quoted(present), " but no ", Quoted(missing)));
      }
    }
    return nearest;
  }

  // The layout that `up`'s bias, of h elements, proves where d and h differ.
  std::optional<WeightLayout> LayoutByBias(const std::string& path, const FeedForwardNames& names) const {
    const Shape* weight = ShapeOf(Weight(path, names.up));
    const Shape* bias = ShapeOf(Bias(path, names.up));
    if (weight == nullptr || bias == nullptr || weight->size() != 2 || bias->size() != 1) return std::nullopt;
    const bool rows = (*weight)[0] == (*bias)[0], columns = (*weight)[1] == (*bias)[0];
    if (rows == columns) return std::nullopt;
    return rows ? WeightLayout::kOutIn : WeightLayout::kInOut;
  }

  void InferActivation(bool known, FeedForwardSpec& spec, Options& options) const {
    const auto take = [&](Activation activation, const std::string& source) {
      spec.activation = ActivationFunction{activation};
      options.Infer("activation", NameIn(kActivationNames, activation), source);
    };
    if (hints_.activation) return take(*hints_.activation, kByCaller);
    const auto told =
        config_.ActivationOf(known                     ? family_->activation_keys
                             : ConfigSpeaksForOthers() ? "hidden_activation hidden_act activation_function"
                                                       : "");
    if (!told.ok()) return options.LeaveOpen("activation", told.status().message());
    if (*told) return take((*told)->value, (*told)->source);
    if (known) return take(family_->activation, absl::StrCat("default of ", family_->model_type));
    options.LeaveOpen("activation");
  }

  const TensorMap& tensors_;
  const ModelConfig& config_;
  const CheckpointHints& hints_;
  const Family* const family_;
  std::set<std::string> norm_paths_, fixed_epsilon_paths_, feed_forward_paths_;
};

}  // namespace

LayerDrafts InferLayers(const TensorMap& tensors, const ModelConfig& config, const CheckpointHints& hints) {
  return LayerFinder(tensors, config, hints).Find();
}

void ApplyHints(const CheckpointHints& hints, LayerDraft& draft) {
  if (auto* norm = std::get_if<NormalizeLayer>(&draft.layer)) {
    if (hints.norm_kind) norm->spec.kind = *hints.norm_kind;
    if (hints.norm_epsilon) norm->spec.epsilon = *hints.norm_epsilon;
    if (hints.norm_rounding) norm->spec.rounding = *hints.norm_rounding;
  } else if (hints.activation) {
    std::get<FeedForwardLayer>(draft.layer).spec.activation = ActivationFunction{*hints.activation};
  }
}

}  // namespace layerd
