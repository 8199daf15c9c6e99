// References to shared memory, in messages and in calls. Threads: pure functions.
#ifndef LAYERD_WIRE_SHARED_MEMORY_CODEC_H_
#define LAYERD_WIRE_SHARED_MEMORY_CODEC_H_

#include <google/protobuf/message.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "layerd/v1/layer_service.pb.h"
#include "layerd/v1/shared_memory.pb.h"
#include "layerd/v1/tensor.pb.h"
#include "lib/base/memory_place.h"
#include "lib/base/shared_regions.h"
#include "wire/message_storage.h"

namespace layerd::wire {

// The regions that a call uses. Threads: const access from any.
class RegionsInUse {
 public:
  // OK where nothing of them was lost since they were found: the call's result is what it should be. FAILED_PRECONDITION
  // with the path of the field otherwise.
  absl::Status CheckIntact() const;
  // The output that was written where the call asked for it goes into its answer as a reference.
  void AddOutputTo(SentStorage& answer) const;

 private:
  friend absl::Status FindAllRegions(const google::protobuf::Message& request, const SharedRegions* regions,
                                     ReceivedStorage& storage, RegionsInUse& uses);
  std::vector<std::pair<std::string, std::shared_ptr<const SharedRegion>>> regions_;  // by the path of their field
  std::optional<std::pair<MemoryPlace, v1::SharedMemory>> output_;
};

// Finds the memory that `request` refers to, for DecodeCall(). `regions`: null where there is no shared memory. Errors with
// the path of the field: INVALID_ARGUMENT for an offset outside of the region, or one that is no multiple of 64; those of
// SharedRegions::Find(); SHARED_MEMORY_OFF.
absl::Status FindRegions(const v1::NormalizeRequest& request, const SharedRegions* regions, ReceivedStorage& storage,
                         RegionsInUse& uses);
absl::Status FindRegions(const v1::FeedForwardRequest& request, const SharedRegions* regions, ReceivedStorage& storage,
                         RegionsInUse& uses);

// INVALID_ARGUMENT where `message`, of a stream, refers to shared memory.
absl::Status CheckNoSharedMemory(const google::protobuf::Message& message);

// The place that `reference`, where `present`, refers to; INVALID_ARGUMENT, under the path `field`, where none was found.
absl::Status DecodePlace(std::string_view field, bool present, const v1::SharedMemory& reference,
                         const ReceivedStorage& storage, std::optional<MemoryPlace>& to);
// Nothing where the receiver does not have all of the place.
std::optional<v1::SharedMemory> EncodePlace(const MemoryPlace& place, const SentStorage& storage);

void EncodeRegion(const SharedRegions::Entry& entry, v1::SharedMemoryRegion& message);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_SHARED_MEMORY_CODEC_H_
