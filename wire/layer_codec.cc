#include "wire/layer_codec.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "wire/spec_codec.h"
#include "wire/tensor_codec.h"

namespace layerd::wire {
namespace {

Quantization DecodeQuantization(const v1::Quantization& message) {
  Quantization quantization;
  quantization.source_hash = message.source_hash();
  for (const v1::MatrixError& one : message.matrices()) {
    quantization.matrices.push_back({one.role(), one.relative_rms_error(), one.max_abs_error()});
  }
  if (message.has_output_relative_rms_error()) {
    quantization.output_relative_rms_error = message.output_relative_rms_error();
  }
  quantization.rows = message.rows();
  quantization.seed = message.seed();
  return quantization;
}

void EncodeQuantization(const Quantization& quantization, v1::Quantization& message) {
  message.set_source_hash(quantization.source_hash);
  for (const MatrixError& one : quantization.matrices) {
    v1::MatrixError& to = *message.add_matrices();
    to.set_role(one.role);
    to.set_relative_rms_error(one.relative_rms_error);
    to.set_max_abs_error(one.max_abs_error);
  }
  if (quantization.output_relative_rms_error) {
    message.set_output_relative_rms_error(*quantization.output_relative_rms_error);
  }
  message.set_rows(quantization.rows);
  message.set_seed(quantization.seed);
}

// Header and Layer both have the options as a oneof, and the quantization, by the same names.
template <typename Message>
absl::StatusOr<Layer> DecodeOptions(const Message& message) {
  if (message.has_normalize()) {
    auto spec = DecodeSpec(message.normalize());
    if (!spec.ok()) return Renamed("spec", "normalize", spec.status());
    if (message.has_quantization()) {
      return InvalidField("quantization", "UNEXPECTED_FIELD", "expected nothing, since the layer is a norm");
    }
    return Layer(NormalizeLayer{*std::move(spec), {}});
  }
  if (message.has_feed_forward()) {
    auto spec = DecodeSpec(message.feed_forward());
    if (!spec.ok()) return Renamed("spec", "feed_forward", spec.status());
    FeedForwardLayer layer{.spec = *std::move(spec)};
    if (message.has_quantization()) layer.quantization = DecodeQuantization(message.quantization());
    return Layer(std::move(layer));
  }
  return MissingField("normalize", "expected normalize or feed_forward, to say what the layer computes, got nothing");
}

template <typename Message>
void EncodeOptions(const Layer& layer, Message& message) {
  if (const auto* norm = std::get_if<NormalizeLayer>(&layer)) {
    EncodeSpec(norm->spec, *message.mutable_normalize());
  } else {
    const auto& feed_forward = std::get<FeedForwardLayer>(layer);
    EncodeSpec(feed_forward.spec, *message.mutable_feed_forward());
    if (feed_forward.quantization) EncodeQuantization(*feed_forward.quantization, *message.mutable_quantization());
  }
}

// The options with their defaults filled in.
Layer WithDefaults(Layer layer) {
  if (auto* norm = std::get_if<NormalizeLayer>(&layer)) {
    norm->spec.epsilon = EpsilonOf(norm->spec);
  } else if (auto& spec = std::get<FeedForwardLayer>(layer).spec; spec.inner_norm) {
    spec.inner_norm->epsilon = spec.inner_norm->epsilon.value_or(kDefaultInnerNormEpsilon);
  }
  return layer;
}

// RFC 3339 is what people see; protobuf counts seconds from 1970.
void EncodeTime(absl::Time time, google::protobuf::Timestamp& message) {
  const int64_t seconds = absl::ToUnixSeconds(time);
  message.set_seconds(seconds);
  message.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
}

}  // namespace

void EncodeListing(const LayerListing& listing, v1::Layer& message) {
  const LayerInfo& info = listing.info;
  message.set_name(info.name);
  message.set_source(info.uploaded ? v1::LAYER_SOURCE_UPLOAD : v1::LAYER_SOURCE_CHECKPOINT);
  if (info.status.ok()) {
    EncodeOptions(WithDefaults(info.outline), message);
    for (const auto& [role, tensor] : WeightsOf(info.outline)) {
      v1::LayerWeight& weight = *message.add_weights();
      weight.set_role(std::string(role));
      weight.set_dtype(EncodeDType(tensor.dtype()));
      for (const int64_t dimension : tensor.shape()) weight.add_shape(dimension);
      const auto name = info.tensors.find(std::string(role));
      weight.set_tensor(name == info.tensors.end() ? std::string(role) : name->second);
    }
    message.set_dim(info.extent.dim);
    message.set_hidden_dim(info.extent.hidden_dim);
    message.set_out_dim(info.extent.out_dim);
    message.set_parameters(info.extent.parameters);
    message.set_weight_bytes(info.extent.weight_bytes);
  } else {
    message.mutable_problem()->set_reason(DetailsOf(info.status).reason);
    message.mutable_problem()->set_message(std::string(info.status.message()));
  }
  message.set_content_hash(info.content_hash);
  if (info.uploaded) {
    message.set_etag(info.content_hash);
    message.set_sha256(info.weights_sha256);
    if (info.create_time != absl::InfinitePast()) EncodeTime(info.create_time, *message.mutable_create_time());
  }
  for (const Inference& inference : info.inferred) {
    v1::Inference& to = *message.add_inferences();
    to.set_option(inference.option);
    to.set_value(inference.value);
    to.set_source(inference.source);
  }
  message.set_prepared(listing.prepared);
  message.set_pinned(listing.pinned);
  message.set_warning(listing.warning);
}

absl::StatusOr<LayerListing> DecodeListing(const v1::Layer& message) {
  LayerListing listing;
  LayerInfo& info = listing.info;
  info.name = message.name();
  info.uploaded = message.source() == v1::LAYER_SOURCE_UPLOAD;
  if (message.has_problem()) {
    ErrorDetails details;
    details.reason = message.problem().reason();
    info.status = WithDetails(absl::StatusCode::kFailedPrecondition, message.problem().message(), details);
  } else {
    auto layer = DecodeOptions(message);
    if (!layer.ok()) return layer.status();
    info.outline = *std::move(layer);
    for (const v1::LayerWeight& weight : message.weights()) {
      const auto dtype = DecodeDType(weight.dtype());
      if (!dtype.ok()) return Under("weights", dtype.status());
      Shape shape(weight.shape().begin(), weight.shape().end());
      if (auto elements = NumElements(shape); !elements.ok()) return Under("weights.shape", elements.status());
      if (auto set = SetWeight(info.outline, weight.role(), Tensor::WithoutData(*dtype, std::move(shape))); !set.ok()) {
        return set;
      }
      info.tensors.emplace(weight.role(), weight.tensor());
    }
    const auto extent = CheckLayer(info.outline);
    if (!extent.ok()) return extent.status();
    info.extent = *extent;
  }
  info.content_hash = message.content_hash();
  info.weights_sha256 = message.sha256();
  if (message.has_create_time()) {
    info.create_time =
        absl::FromUnixSeconds(message.create_time().seconds()) + absl::Nanoseconds(message.create_time().nanos());
  }
  for (const v1::Inference& inference : message.inferences()) {
    info.inferred.push_back({inference.option(), inference.value(), inference.source()});
  }
  listing.prepared = message.prepared();
  listing.pinned = message.pinned();
  listing.warning = message.warning();
  return listing;
}

absl::StatusOr<UploadHeader> DecodeHeader(const v1::LayerHeader& message) {
  UploadHeader header;
  header.name = message.name();
  auto layer = DecodeOptions(message);
  if (!layer.ok()) return Under("header", layer.status());
  header.layer = *std::move(layer);
  header.size_bytes = message.size_bytes();
  header.sha256 = message.sha256();
  if (!message.etag().empty()) header.etag = message.etag();
  return header;
}

void EncodeHeader(const UploadHeader& header, v1::LayerHeader& message) {
  message.set_name(header.name);
  EncodeOptions(header.layer, message);
  message.set_size_bytes(header.size_bytes);
  message.set_sha256(header.sha256);
  if (header.etag) message.set_etag(*header.etag);
}

absl::StatusOr<LayerQuery> DecodeQuery(const v1::ListLayersRequest& request) {
  constexpr std::string_view kModels = "models/";
  LayerQuery query;
  const std::string_view parent = request.parent();
  if (!parent.empty() && parent != "models/-") {
    if (parent.substr(0, kModels.size()) != kModels || parent.find('/', kModels.size()) != std::string_view::npos ||
        parent.size() == kModels.size()) {
      return InvalidField("parent", "BAD_NAME",
                          absl::StrCat("expected models/{model} or models/-, got ", Shortened(parent)));
    }
    query.model = std::string(parent.substr(kModels.size()));
  }
  query.filter = request.filter();
  query.page_size = request.page_size();
  query.page_token = request.page_token();
  return query;
}

}  // namespace layerd::wire
