#include "wire/shared_memory_codec.h"

#include <google/protobuf/descriptor.h>

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"
#include "wire/message_routes.h"

namespace layerd::wire {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

using Visit = absl::FunctionRef<absl::Status(const v1::SharedMemory&, const std::string& path)>;

// Visits the references in `message`, whose own path is `path`, until one is in error.
absl::Status ForEachReference(const Message& message, const std::string& path, Visit visit) {
  static const auto* const routes =
      new MessageRoutes(*v1::NormalizeRequest::descriptor()->file(), *v1::SharedMemory::descriptor());
  const auto& type = *message.GetDescriptor();
  if (&type == v1::SharedMemory::descriptor()) return visit(static_cast<const v1::SharedMemory&>(message), path);
  const auto& reflection = *message.GetReflection();
  for (const FieldDescriptor* field : routes->From(type)) {
    if (!reflection.HasField(message, field)) continue;
    auto status = ForEachReference(reflection.GetMessage(message, field),
                                   path.empty() ? field->name() : absl::StrCat(path, ".", field->name()), visit);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckOffset(int64_t offset, int64_t region_bytes) {
  if (offset < 0 || offset > region_bytes) {
    return InvalidField("offset", "OUT_OF_RANGE",
                        absl::StrCat("expected 0 to ", region_bytes, ", the region's size, got ", offset));
  }
  if (offset % SharedRegion::kAlignment != 0) {
    return InvalidField("offset", "MISALIGNED",
                        absl::StrCat("expected a multiple of ", SharedRegion::kAlignment, ", got ", offset));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RegionsInUse::CheckIntact() const {
  for (const auto& [path, region] : regions_) {
    if (auto status = region->CheckIntact(); !status.ok()) return Under(path, status);
  }
  return absl::OkStatus();
}

void RegionsInUse::AddOutputTo(SentStorage& answer) const {
  if (!output_) return;
  const auto& [place, reference] = *output_;
  answer.AddShared({place.data.get(), static_cast<size_t>(place.bytes)}, reference);
}

absl::Status FindAllRegions(const Message& request, const SharedRegions* regions, ReceivedStorage& storage,
                            RegionsInUse& uses) {
  return ForEachReference(request, "", [&](const v1::SharedMemory& reference, const std::string& path) {
    if (regions == nullptr) return SharedMemoryOff(path);
    if (reference.region().empty()) {
      return MissingField(absl::StrCat(path, ".region"), "expected the name of a registered region, got nothing");
    }
    auto region = regions->Find(reference.region());
    if (!region.ok()) return Under(path, region.status());
    if (auto status = CheckOffset(reference.offset(), (*region)->size_bytes()); !status.ok()) {
      return Under(path, status);
    }
    const MemoryPlace place{std::shared_ptr<std::byte>(*region, (*region)->data() + reference.offset()),
                            (*region)->size_bytes() - reference.offset()};
    storage.AddShared(reference, place);
    uses.regions_.emplace_back(path, *std::move(region));
    if (path == "output_memory") uses.output_.emplace(place, reference);
    return absl::OkStatus();
  });
}

// Most requests refer to nothing, which is seen without a walk through their fields.
absl::Status FindRegions(const v1::NormalizeRequest& request, const SharedRegions* regions, ReceivedStorage& storage,
                         RegionsInUse& uses) {
  const bool may_refer = request.has_output_memory() || request.input().has_shared_memory() || request.has_gamma() ||
                         request.has_beta() || request.has_residual() || request.has_gate();
  return may_refer ? FindAllRegions(request, regions, storage, uses) : absl::OkStatus();
}

absl::Status FindRegions(const v1::FeedForwardRequest& request, const SharedRegions* regions, ReceivedStorage& storage,
                         RegionsInUse& uses) {
  const bool may_refer = request.has_output_memory() || request.input().has_shared_memory() || request.has_weights();
  return may_refer ? FindAllRegions(request, regions, storage, uses) : absl::OkStatus();
}

absl::Status CheckNoSharedMemory(const Message& message) {
  return ForEachReference(message, "", [](const v1::SharedMemory&, const std::string& path) {
    return InvalidField(path, "UNEXPECTED_FIELD",
                        "expected nothing: the messages of a stream have their tensors in themselves");
  });
}

void EncodeRegion(const SharedRegions::Entry& entry, v1::SharedMemoryRegion& message) {
  message.set_name(entry.name);
  message.set_file(entry.region->file());
  message.set_size_bytes(entry.region->size_bytes());
}

absl::Status DecodePlace(std::string_view field, bool present, const v1::SharedMemory& reference,
                         const ReceivedStorage& storage, std::optional<MemoryPlace>& to) {
  if (!present) return absl::OkStatus();
  const MemoryPlace* place = storage.FindShared(reference);
  if (place == nullptr) {
    return InvalidField(field, "UNEXPECTED_FIELD", "expected nothing, got a place in memory that is not shared");
  }
  to = *place;
  return absl::OkStatus();
}

std::optional<v1::SharedMemory> EncodePlace(const MemoryPlace& place, const SentStorage& storage) {
  return storage.ReferenceTo({place.data.get(), static_cast<size_t>(place.bytes)});
}

}  // namespace layerd::wire
