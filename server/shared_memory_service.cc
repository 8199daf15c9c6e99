#include "server/shared_memory_service.h"

#include <google/protobuf/empty.pb.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "layerd/v1/shared_memory.grpc.pb.h"
#include "lib/base/errors.h"
#include "server/log.h"
#include "server/worker_call.h"
#include "wire/shared_memory_codec.h"

namespace layerd {
namespace {

// Requests have two names in them.
constexpr int64_t kMaxMessageBytes = int64_t{1} << 20;
constexpr int kQueueCalls = 256;

}  // namespace

SharedMemoryService::SharedMemoryService(SharedRegions* regions, CallGate& gate)
    : regions_(regions), gate_(gate), worker_(1, kQueueCalls, "calls of SharedMemoryRegistry") {}

template <typename Request, typename Handle>
void SharedMemoryService::Serve(CallLoop& loop, const char* method, Handle handle) {
  const ServeBytes serve = ServeMessages<Request>(
      kMaxMessageBytes, [this, handle](const Request& message) -> decltype(handle(*regions_, message)) {
        if (regions_ == nullptr) return SharedMemoryOff("");
        return handle(*regions_, message);
      });
  loop.Serve(absl::StrCat("/", v1::SharedMemoryRegistry::service_full_name(), "/", method),
             [this, serve](std::unique_ptr<CallArrival> arrival) {
               return NewWorkerCall(std::move(arrival), gate_, worker_, serve);
             });
}

void SharedMemoryService::AddTo(CallLoop& loop) {
  Serve<v1::RegisterRegionRequest>(
      loop, "RegisterRegion",
      [](SharedRegions& regions, const v1::RegisterRegionRequest& message) -> absl::StatusOr<v1::SharedMemoryRegion> {
        const auto entry = regions.Register(message.name(), message.file());
        if (!entry.ok()) return entry.status();
        v1::SharedMemoryRegion answer;
        wire::EncodeRegion(*entry, answer);
        Log(LogLevel::kInfo, "region_registered",
            {{"region", answer.name()}, {"file", answer.file()}, {"bytes", absl::StrCat(answer.size_bytes())}});
        return answer;
      });
  Serve<v1::UnregisterRegionRequest>(
      loop, "UnregisterRegion",
      [](SharedRegions& regions,
         const v1::UnregisterRegionRequest& message) -> absl::StatusOr<google::protobuf::Empty> {
        if (message.name().empty()) return MissingField("name", "expected the name of a region, got nothing");
        if (auto status = regions.Unregister(message.name()); !status.ok()) return status;
        Log(LogLevel::kInfo, "region_unregistered", {{"region", message.name()}});
        return google::protobuf::Empty();
      });
  Serve<v1::ListRegionsRequest>(
      loop, "ListRegions",
      [](SharedRegions& regions, const v1::ListRegionsRequest&) -> absl::StatusOr<v1::ListRegionsResponse> {
        v1::ListRegionsResponse answer;
        for (const auto& entry : regions.List()) wire::EncodeRegion(entry, *answer.add_regions());
        return answer;
      });
}

}  // namespace layerd
