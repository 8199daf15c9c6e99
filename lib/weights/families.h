// The families of models whose checkpoints are known: how their modules are named, and what their layers compute. Facts
// only; docs/checkpoints.md shows the table and tells how to add a family.
//
// Threads: constants and pure functions.
#ifndef LAYERD_LIB_WEIGHTS_FAMILIES_H_
#define LAYERD_LIB_WEIGHTS_FAMILIES_H_

#include <optional>
#include <string_view>

#include "absl/types/span.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"

namespace layerd {

// The matrices of a feed-forward module by name, without ".weight" and ".bias"; null: this form has no such matrix.
struct FeedForwardNames {
  FeedForwardForm form = FeedForwardForm::kGated;
  GateUpPacking packing = GateUpPacking::kSeparate;
  std::optional<WeightLayout> layout = WeightLayout::kOutIn;  // nothing: families differ
  const char* gate = nullptr;
  const char* up = nullptr;
  const char* gate_up = nullptr;
  const char* down = nullptr;
  const char* inner_norm = nullptr;  // a module that may stand between the activation and `down`
  // What makes the layer's name of its module's, where other parts than the feed-forward layer live in that module too.
  const char* name_suffix = "";
};

// Paths of modules have {i} in place of each number, and are separated by spaces.
struct Family {
  const char* model_type;
  // What may stand before all the paths below; "." stands for nothing at all.
  const char* roots = ". model. language_model. language_model.model. model.language_model.";

  const char* norms = "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm norm";
  // Norms that have `epsilon` whatever config.json says.
  const char* fixed_epsilon_norms = "";
  NormKind kind = NormKind::kRmsNorm;
  NormRounding rounding = NormRounding::kBeforeGamma;
  double gamma_offset = 0;
  const char* epsilon_keys = "rms_norm_eps";  // of config.json
  double epsilon = 1e-6;                      // where config.json has none of them

  const char* feed_forwards = "layers.{i}.mlp";
  const FeedForwardNames* names;
  const char* activation_keys = "hidden_act";  // of config.json
  Activation activation = Activation::kSilu;   // where config.json has none of them
  bool gelu_means_tanh = false;
};

absl::Span<const Family> KnownFamilies();
// Null where there is none.
const Family* FindFamily(std::string_view model_type);

// The names that tell a feed-forward layer's form where no family does.
absl::Span<const FeedForwardNames> WellKnownFeedForwardNames();

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_FAMILIES_H_
