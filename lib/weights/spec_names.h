// The options of layers by name, as files and command lines have them: the names of proto/layerd/v1's enumerations
// without their prefix, in lower case.
//
// Threads: constants and pure functions.
#ifndef LAYERD_LIB_WEIGHTS_SPEC_NAMES_H_
#define LAYERD_LIB_WEIGHTS_SPEC_NAMES_H_

#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"

namespace layerd {

inline constexpr std::pair<const char*, NormKind> kNormKindNames[] = {{"rms_norm", NormKind::kRmsNorm},
                                                                      {"layer_norm", NormKind::kLayerNorm}};
inline constexpr std::pair<const char*, NormRounding> kNormRoundingNames[] = {
    {"before_gamma", NormRounding::kBeforeGamma}, {"after_gamma", NormRounding::kAfterGamma}};
inline constexpr std::pair<const char*, GatePosition> kGatePositionNames[] = {
    {"none", GatePosition::kNone}, {"first", GatePosition::kFirst}, {"last", GatePosition::kLast}};
inline constexpr std::pair<const char*, FeedForwardForm> kFeedForwardFormNames[] = {{"gated", FeedForwardForm::kGated},
                                                                                    {"plain", FeedForwardForm::kPlain}};
inline constexpr std::pair<const char*, Activation> kActivationNames[] = {
    {"identity", Activation::kIdentity},        {"sigmoid", Activation::kSigmoid}, {"relu", Activation::kRelu},
    {"relu_squared", Activation::kReluSquared}, {"gelu", Activation::kGelu},       {"gelu_tanh", Activation::kGeluTanh},
    {"quick_gelu", Activation::kQuickGelu},     {"silu", Activation::kSilu}};
inline constexpr std::pair<const char*, GateUpPacking> kGateUpPackingNames[] = {
    {"separate", GateUpPacking::kSeparate},
    {"halves", GateUpPacking::kHalves},
    {"interleaved", GateUpPacking::kInterleaved}};
inline constexpr std::pair<const char*, WeightLayout> kWeightLayoutNames[] = {{"in_out", WeightLayout::kInOut},
                                                                              {"out_in", WeightLayout::kOutIn}};

// The name of `value`; "unspecified" where the table has none.
template <typename T, size_t kRows>
constexpr const char* NameIn(const std::pair<const char*, T> (&table)[kRows], T value) {
  for (const auto& [name, one] : table) {
    if (one == value) return name;
  }
  return "unspecified";
}

// The value named `name`; nothing where the table has none.
template <typename T, size_t kRows>
constexpr std::optional<T> ValueIn(const std::pair<const char*, T> (&table)[kRows], std::string_view name) {
  for (const auto& [one, value] : table) {
    if (one == name) return value;
  }
  return std::nullopt;
}

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_SPEC_NAMES_H_
