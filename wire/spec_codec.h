// Layers' options between their messages and lib. Field paths begin with "spec"; callers whose message has another path
// put the rest in front or in its place. Threads: pure functions.
#ifndef LAYERD_WIRE_SPEC_CODEC_H_
#define LAYERD_WIRE_SPEC_CODEC_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"
#include "lib/engine/layer_engine.h"

namespace layerd::wire {

// What the message says, be it all that a layer needs or not. INVALID_ARGUMENT for an unknown enum value.
absl::StatusOr<NormalizeSaid> DecodeSaid(const v1::NormalizeSpec& message);
absl::StatusOr<FeedForwardSaid> DecodeSaid(const v1::FeedForwardSpec& message);
void EncodeSaid(const NormalizeSaid& said, v1::NormalizeSpec& message);
void EncodeSaid(const FeedForwardSaid& said, v1::FeedForwardSpec& message);

// The options of a layer. INVALID_ARGUMENT also for one that is required and missing, or that does not belong to the form.
absl::StatusOr<NormalizeSpec> DecodeSpec(const v1::NormalizeSpec& message);
absl::StatusOr<FeedForwardSpec> DecodeSpec(const v1::FeedForwardSpec& message);
void EncodeSpec(const NormalizeSpec& spec, v1::NormalizeSpec& message);
void EncodeSpec(const FeedForwardSpec& spec, v1::FeedForwardSpec& message);

// What layer a request is for: its name and what it says of it, or its options. The tensors are the caller's to read.
// INVALID_ARGUMENT as above; field "spec" where there is neither.
template <typename Request, typename Call>
absl::Status DecodeLayer(const Request& request, Call& call) {
  if (request.layer().empty()) {
    if (!request.has_spec()) return MissingField("spec", "expected what to compute, or layer, got nothing");
    auto spec = DecodeSpec(request.spec());
    if (!spec.ok()) return spec.status();
    call.spec = *std::move(spec);
    return absl::OkStatus();
  }
  call.layer = request.layer();
  auto said = DecodeSaid(request.spec());
  if (!said.ok()) return said.status();
  call.said = *std::move(said);
  return absl::OkStatus();
}

template <typename Call, typename Request>
void EncodeLayer(const Call& call, Request& request) {
  if (call.layer.empty()) {
    EncodeSpec(call.spec, *request.mutable_spec());
    return;
  }
  request.set_layer(call.layer);
  EncodeSaid(call.said, *request.mutable_spec());
}

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_SPEC_CODEC_H_
