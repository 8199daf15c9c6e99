#include "lib/resident/layer_registry.h"

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

absl::Status CannotChange(std::string_view field, std::string_view reason, const std::string& text) {
  ErrorDetails details;
  details.reason = std::string(reason);
  details.field = std::string(field);
  return WithDetails(absl::StatusCode::kFailedPrecondition, absl::StrCat(details.field, ": ", text), details);
}

}  // namespace

absl::Status LayerRegistry::CheckChangeable(std::string_view field, std::string_view name) {
  if (store_ == nullptr) {
    return CannotChange(field, "NO_LAYER_STORE", "this server keeps no layers of callers (--layer_store)");
  }
  const auto parsed = ParseLayerName(name);
  if (models_ != nullptr && !models_->WaitForFirstLook(absl::InfinitePast())) return ModelsNotRead();
  if (parsed && models_ != nullptr && models_->HasModel(parsed->model)) {
    return CannotChange(field, "READ_ONLY",
                        absl::StrCat("models/", parsed->model,
                                     " is a checkpoint of the server's (--models), which callers "
                                     "cannot change; expected another model"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LayerStore::Upload>> LayerRegistry::BeginUpload(const UploadHeader& header) {
  if (auto status = CheckChangeable("header.name", header.name); !status.ok()) return status;
  return store_->Begin(header);
}

absl::Status LayerRegistry::Delete(std::string_view name, const std::optional<std::string>& etag) {
  // Without a store there is no layer to delete, but for checkpoints'.
  if (const auto listing = library_.Get(name); !listing.ok()) return listing.status();
  if (auto status = CheckChangeable("name", name); !status.ok()) return status;
  return store_->Delete(name, etag);
}

}  // namespace layerd
