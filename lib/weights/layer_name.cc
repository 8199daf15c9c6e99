#include "lib/weights/layer_name.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"

namespace layerd {
namespace {

constexpr std::string_view kModels = "models/", kLayers = "/layers/";

}  // namespace

std::string LayerName::Full() const { return absl::StrCat("models/", model, "/layers/", layer); }

bool IsNamePart(std::string_view part) {
  return !part.empty() && part.size() <= kMaxNamePartBytes && part.front() != '.' &&
         std::all_of(part.begin(), part.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
         });
}

std::optional<LayerName> ParseLayerName(std::string_view name) {
  if (name.substr(0, kModels.size()) != kModels) return std::nullopt;
  name.remove_prefix(kModels.size());
  const size_t layers = name.find(kLayers);
  if (layers == std::string_view::npos) return std::nullopt;
  const std::string_view model = name.substr(0, layers), layer = name.substr(layers + kLayers.size());
  if (!IsNamePart(model) || !IsNamePart(layer)) return std::nullopt;
  return LayerName{std::string(model), std::string(layer)};
}

absl::Status LayerNotFound(std::string_view field, std::string_view name) {
  ErrorDetails details;
  details.reason = "LAYER_NOT_FOUND";
  details.field = std::string(field);
  details.resource_type = "layer";
  details.resource_name = Shortened(name);
  return WithDetails(absl::StatusCode::kNotFound,
                     absl::StrCat(std::string(field), ": there is no layer ", Quoted(name)), details);
}

}  // namespace layerd
