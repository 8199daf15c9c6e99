#include "wire/message_storage.h"

#include <functional>

#include "lib/base/shared_regions.h"

namespace layerd::wire {

std::optional<v1::SharedMemory> SentStorage::ReferenceTo(absl::Span<const std::byte> memory) const {
  const std::less_equal<> not_behind;
  for (const auto& [shared, reference] : shared_) {
    if (!not_behind(shared.data(), memory.data())) continue;
    if (!not_behind(memory.data() + memory.size(), shared.data() + shared.size())) continue;
    const int64_t offset = reference.offset() + (memory.data() - shared.data());
    if (offset % SharedRegion::kAlignment != 0) continue;
    v1::SharedMemory at = reference;
    at.set_offset(offset);
    return at;
  }
  return std::nullopt;
}

}  // namespace layerd::wire
