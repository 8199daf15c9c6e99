#include "wire/status_codec.h"

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "lib/base/errors.h"

namespace layerd::wire {
namespace {

// What of a text that came from a caller may travel: gRPC percent-encodes every byte outside printable ASCII to three,
// and peers drop or replace errors whose metadata passes 8 KiB.
constexpr size_t kMaxWireTextBytes = 1024;

std::string WithoutFieldPath(std::string_view text, std::string_view field) {
  if (!field.empty() && text.substr(0, field.size()) == field && text.substr(field.size(), 2) == ": ") {
    text.remove_prefix(field.size() + 2);
  }
  return std::string(text);
}

}  // namespace

grpc::Status EncodeStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const ErrorDetails details = DetailsOf(status);
  google::rpc::Status rich;
  rich.set_code(static_cast<int>(status.code()));
  rich.set_message(Shortened(std::string_view(status.message().data(), status.message().size()), kMaxWireTextBytes));

  google::rpc::ErrorInfo info;
  info.set_reason(details.reason);
  info.set_domain(kErrorDomain);
  rich.add_details()->PackFrom(info);
  if (!details.field.empty()) {
    google::rpc::BadRequest bad_request;
    auto* violation = bad_request.add_field_violations();
    violation->set_field(details.field);
    violation->set_reason(details.reason);
    violation->set_description(WithoutFieldPath(rich.message(), details.field));
    rich.add_details()->PackFrom(bad_request);
  }
  if (!details.resource_type.empty()) {
    google::rpc::ResourceInfo resource;
    resource.set_resource_type(details.resource_type);
    resource.set_resource_name(Shortened(details.resource_name));
    rich.add_details()->PackFrom(resource);
  }
  if (details.retry_delay_ms && *details.retry_delay_ms >= 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(*details.retry_delay_ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(*details.retry_delay_ms % 1000 * 1000000));
    rich.add_details()->PackFrom(retry);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), rich.message(), rich.SerializeAsString());
}

std::optional<std::string> PushbackOf(const absl::Status& status) {
  const auto delay = DetailsOf(status).retry_delay_ms;
  if (!delay) return std::nullopt;
  return absl::StrCat(*delay);
}

absl::Status DecodeStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  ErrorDetails details;
  google::rpc::Status rich;
  if (rich.ParseFromString(status.error_details())) {
    for (const auto& any : rich.details()) {
      google::rpc::ErrorInfo info;
      google::rpc::BadRequest bad_request;
      google::rpc::ResourceInfo resource;
      google::rpc::RetryInfo retry;
      if (any.UnpackTo(&info)) {
        details.reason = info.reason();
      } else if (any.UnpackTo(&bad_request) && bad_request.field_violations_size() > 0) {
        details.field = bad_request.field_violations(0).field();
      } else if (any.UnpackTo(&resource)) {
        details.resource_type = resource.resource_type();
        details.resource_name = resource.resource_name();
      } else if (any.UnpackTo(&retry)) {
        details.retry_delay_ms = retry.retry_delay().seconds() * 1000 + retry.retry_delay().nanos() / 1000000;
      }
    }
  }
  return WithDetails(static_cast<absl::StatusCode>(status.error_code()), status.error_message(), details);
}

}  // namespace layerd::wire
