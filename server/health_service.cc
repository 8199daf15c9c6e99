#include "server/health_service.h"

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "wire/message_codec.h"

namespace layerd {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// Requests have one name in them.
constexpr int64_t kMaxMessageBytes = 65536;

absl::Status UnknownService(const std::string& service) {
  ErrorDetails details;
  details.reason = "SERVICE_NOT_FOUND";
  details.field = "service";
  return WithDetails(absl::StatusCode::kNotFound, absl::StrCat("service: there is no service ", Shortened(service)),
                     details);
}

absl::Status Encode(HealthCheckResponse::ServingStatus status, grpc::ByteBuffer& bytes) {
  HealthCheckResponse response;
  response.set_status(status);
  return wire::SerializeMessage(response, bytes);
}

}  // namespace

class HealthService::Check final : public ServerCall {
 public:
  Check(HealthService& service, std::unique_ptr<CallArrival> arrival)
      : ServerCall(std::move(arrival)), service_(service) {
    StartRead(&bytes_);
  }

  void OnReadDone(bool ok) override {
    HealthCheckRequest request;
    absl::Status status = ok ? wire::ParseMessage(bytes_, kMaxMessageBytes, request) : NoMessage();
    if (status.ok()) {
      std::lock_guard<std::mutex> lock(service_.mutex_);
      const auto found = service_.statuses_.find(request.service());
      status = found == service_.statuses_.end() ? UnknownService(request.service()) : Encode(found->second, bytes_);
    }
    status.ok() ? StartWriteAndFinish(bytes_) : Finish(status);
  }
  void OnDone() override { delete this; }

 private:
  HealthService& service_;
  grpc::ByteBuffer bytes_;
};

// Says the status when it is asked, and each time it is another than was said last.
class HealthService::Watch final : public ServerCall {
 public:
  Watch(HealthService& service, std::unique_ptr<CallArrival> arrival)
      : ServerCall(std::move(arrival)), service_(service) {
    StartRead(&bytes_);
  }

  void OnReadDone(bool ok) override {
    HealthCheckRequest request;
    const absl::Status status = ok ? wire::ParseMessage(bytes_, kMaxMessageBytes, request) : NoMessage();
    std::lock_guard<std::mutex> lock(service_.mutex_);
    if (ended_) return;
    if (!status.ok()) return End(status);
    of_ = request.service();
    service_.watches_.insert(this);
    Say();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard<std::mutex> lock(service_.mutex_);
    writing_ = false;
    if (--service_.telling_ == 0) service_.told_.notify_all();
    if (ended_) return Finish(CancelledWhileWaiting());
    ok ? Say() : End(CancelledWhileWaiting());
  }

  void OnCancel() override {
    std::lock_guard<std::mutex> lock(service_.mutex_);
    if (!ended_) End(CancelledWhileWaiting());
  }

  void OnDone() override { delete this; }

  // With mutex_ held, as the rest.
  void Say() {
    const auto found = service_.statuses_.find(of_);
    const Status now = found == service_.statuses_.end() ? HealthCheckResponse::SERVICE_UNKNOWN : found->second;
    if (writing_ || said_ == now) return;
    if (const auto status = Encode(now, bytes_); !status.ok()) return End(status);
    said_ = now;
    writing_ = true;
    ++service_.telling_;
    StartWrite(bytes_);
  }

 private:
  // A write that is under way is awaited.
  void End(const absl::Status& status) {
    ended_ = true;
    service_.watches_.erase(this);
    if (!writing_) Finish(status);
  }

  HealthService& service_;
  grpc::ByteBuffer bytes_;
  // Guarded by the service's mutex_.
  std::string of_;
  std::optional<Status> said_;
  bool writing_ = false;
  bool ended_ = false;
};

void HealthService::AddTo(CallLoop& loop) {
  loop.Serve("/grpc.health.v1.Health/Check",
             [this](std::unique_ptr<CallArrival> arrival) { return new Check(*this, std::move(arrival)); });
  loop.Serve("/grpc.health.v1.Health/Watch",
             [this](std::unique_ptr<CallArrival> arrival) { return new Watch(*this, std::move(arrival)); });
}

void HealthService::SetServing(const std::string& service, bool serving) {
  std::lock_guard<std::mutex> lock(mutex_);
  statuses_[service] = serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
  for (Watch* watch : std::set<Watch*>(watches_)) watch->Say();
}

void HealthService::AwaitTold(absl::Duration limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  told_.wait_for(lock, absl::ToChronoNanoseconds(limit), [this] { return telling_ == 0; });
}

}  // namespace layerd
