// Names of resident layers: models/{model}/layers/{layer}.
//
// A model's or layer's own name has letters, digits, '.', '_' and '-', does not begin with '.', and has at most 128
// bytes. So a name is a safe path of a file, and no name leads out of its folder.
//
// Threads: pure functions.
#ifndef LAYERD_LIB_WEIGHTS_LAYER_NAME_H_
#define LAYERD_LIB_WEIGHTS_LAYER_NAME_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace layerd {

inline constexpr size_t kMaxNamePartBytes = 128;

struct LayerName {
  std::string model;
  std::string layer;

  std::string Full() const;
};

// Whether `part` is a model's or a layer's own name.
bool IsNamePart(std::string_view part);

// Nothing for text that is no such name.
std::optional<LayerName> ParseLayerName(std::string_view name);

// NOT_FOUND, reason LAYER_NOT_FOUND, field `field`: there is no such layer, or none that the caller may know of; for text
// that can be no layer's name too. The text quotes the name, shortened.
absl::Status LayerNotFound(std::string_view field, std::string_view name);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_LAYER_NAME_H_
