#include "server/shared_memory_service.h"

#include <google/protobuf/empty.pb.h>

#include <cstdint>
#include <new>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "server/log.h"
#include "wire/message_codec.h"
#include "wire/shared_memory_codec.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// Requests have two names in them.
constexpr int64_t kMaxMessageBytes = int64_t{1} << 20;
constexpr int kQueueCalls = 256;

class Reactor final : public grpc::ServerUnaryReactor {
 public:
  Reactor(grpc::CallbackServerContext* context, absl::AnyInvocable<void()> on_done)
      : context_(context), on_done_(std::move(on_done)) {}
  void FinishWith(const absl::Status& status) {
    if (const auto pushback = wire::PushbackOf(status)) {
      context_->AddTrailingMetadata(wire::kPushbackTrailer, *pushback);
    }
    Finish(wire::EncodeStatus(status));
  }
  void OnDone() override {
    if (on_done_) on_done_();
    delete this;
  }

 private:
  grpc::CallbackServerContext* const context_;
  absl::AnyInvocable<void()> on_done_;
};

}  // namespace

SharedMemoryService::SharedMemoryService(SharedRegions* regions, CallGate& gate)
    : regions_(regions), gate_(gate), worker_(1, kQueueCalls, "calls of SharedMemoryRegistry") {}

template <typename Request, typename Handle>
grpc::ServerUnaryReactor* SharedMemoryService::Serve(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
                                                     Handle handle) {
  absl::Status status = gate_.Enter();
  auto* reactor = new Reactor(context, status.ok() ? absl::AnyInvocable<void()>([this] { gate_.Leave(); }) : nullptr);
  if (status.ok() && regions_ == nullptr) status = SharedMemoryOff("");
  if (status.ok()) {
    auto* bytes = const_cast<grpc::ByteBuffer*>(request);
    status = worker_.Submit([this, bytes, response, reactor, handle] {
      absl::Status served;
      try {
        Request message;
        served = wire::ParseMessage(*bytes, kMaxMessageBytes, message);
        if (served.ok()) {
          const auto answer = handle(*regions_, message);
          served = answer.ok() ? wire::SerializeMessage(*answer, *response) : answer.status();
        }
      } catch (const std::bad_alloc&) {
        served = OutOfMemory();
      }
      reactor->FinishWith(served);
    });
  }
  if (!status.ok()) reactor->FinishWith(status);
  return reactor;
}

grpc::ServerUnaryReactor* SharedMemoryService::RegisterRegion(grpc::CallbackServerContext* context,
                                                              const grpc::ByteBuffer* request,
                                                              grpc::ByteBuffer* response) {
  return Serve<v1::RegisterRegionRequest>(
      context, request, response,
      [](SharedRegions& regions, const v1::RegisterRegionRequest& message) -> absl::StatusOr<v1::SharedMemoryRegion> {
        const auto entry = regions.Register(message.name(), message.file());
        if (!entry.ok()) return entry.status();
        v1::SharedMemoryRegion answer;
        wire::EncodeRegion(*entry, answer);
        Log(LogLevel::kInfo, "region_registered",
            {{"region", answer.name()}, {"file", answer.file()}, {"bytes", absl::StrCat(answer.size_bytes())}});
        return answer;
      });
}

grpc::ServerUnaryReactor* SharedMemoryService::UnregisterRegion(grpc::CallbackServerContext* context,
                                                                const grpc::ByteBuffer* request,
                                                                grpc::ByteBuffer* response) {
  return Serve<v1::UnregisterRegionRequest>(
      context, request, response,
      [](SharedRegions& regions,
         const v1::UnregisterRegionRequest& message) -> absl::StatusOr<google::protobuf::Empty> {
        if (message.name().empty()) return MissingField("name", "expected the name of a region, got nothing");
        if (auto status = regions.Unregister(message.name()); !status.ok()) return status;
        Log(LogLevel::kInfo, "region_unregistered", {{"region", message.name()}});
        return google::protobuf::Empty();
      });
}

grpc::ServerUnaryReactor* SharedMemoryService::ListRegions(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* response) {
  return Serve<v1::ListRegionsRequest>(
      context, request, response,
      [](SharedRegions& regions, const v1::ListRegionsRequest&) -> absl::StatusOr<v1::ListRegionsResponse> {
        v1::ListRegionsResponse answer;
        for (const auto& entry : regions.List()) wire::EncodeRegion(entry, *answer.add_regions());
        return answer;
      });
}

}  // namespace layerd
