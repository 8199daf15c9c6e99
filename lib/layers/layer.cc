#include "lib/layers/layer.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"

namespace layerd {
namespace {

// Calls visit(role, member) for every role of a layer's weights, const or not.
template <typename AnyLayer, typename Visit>
void ForEachRole(AnyLayer& layer, const Visit& visit) {
  if (auto* norm = std::get_if<NormalizeLayer>(&layer)) {
    for (const auto& [role, member] : kNormalizeRoles) visit(role, norm->weights.*member);
  } else {
    auto& weights = std::get<FeedForwardLayer>(layer).weights;
    for (const auto& [role, member] : kFeedForwardRoles) visit(role, weights.*member);
  }
}

// The input that a check of shapes needs: no row, and the dtype that asks most of a norm's options.
Tensor NoRows(int64_t dim) { return Tensor::WithoutData(DType::kBFloat16, {0, dim}); }

absl::StatusOr<LayerExtent> CheckWeights(const NormalizeLayer& layer) {
  const std::optional<Tensor>& gamma = layer.weights.gamma;
  if (!gamma) return MissingField("weights.gamma", "expected a tensor, since a norm without one has nothing to keep");
  if (gamma->rank() != 1 || gamma->dim(0) == 0) {
    return InvalidField("weights.gamma.shape", "SHAPE_MISMATCH",
                        absl::StrCat("expected [d] with d of 1 or more, got ", ToString(gamma->shape())));
  }
  const int64_t dim = gamma->dim(0);
  if (layer.spec.normalized_axes != 1) {
    return InvalidField("spec.normalized_axes", "OUT_OF_RANGE",
                        absl::StrCat("expected 1 for a layer that is kept, got ", layer.spec.normalized_axes));
  }
  NormalizeInputs inputs{.input = NoRows(dim), .gamma = gamma, .beta = layer.weights.beta};
  if (layer.spec.gate_position != GatePosition::kNone) inputs.gate = inputs.input;
  if (auto extent = CheckNormalize(layer.spec, inputs); !extent.ok()) {
    const std::string field = DetailsOf(extent.status()).field;
    return field.rfind("spec", 0) == 0 ? extent.status() : Under("weights", extent.status());
  }
  return LayerExtent{.dim = dim, .hidden_dim = 0, .out_dim = dim};
}

absl::StatusOr<LayerExtent> CheckWeights(const FeedForwardLayer& layer) {
  if (layer.quantization) {
    if (auto status = CheckFigures(*layer.quantization); !status.ok()) return status;
  }
  // The first matrix tells d; where it is missing or no matrix, the check of the whole says so.
  const FeedForwardWeights& weights = layer.weights;
  const std::optional<Tensor>& first = weights.gate ? weights.gate : weights.up ? weights.up : weights.gate_up;
  const bool out_in = layer.spec.layout == WeightLayout::kOutIn;
  const int64_t dim = first && first->rank() == 2 ? first->dim(out_in ? 1 : 0) : 1;
  const auto extent = CheckFeedForward(layer.spec, weights, NoRows(dim == 0 ? 1 : dim));
  if (!extent.ok()) {
    const ErrorDetails details = DetailsOf(extent.status());
    if (first && first->rank() != 2 && details.reason == "SHAPE_MISMATCH") {  // nobody said what d is
      return InvalidField(details.field, details.reason,
                          absl::StrCat("expected a matrix, got ", ToString(first->shape())));
    }
    return extent.status();
  }
  if (layer.quantization) {
    std::vector<std::string_view> int8_matrices;
    for (const auto& [role, matrix, scale] : kFeedForwardMatrices) {
      if ((weights.*scale).has_value()) int8_matrices.push_back(role);
    }
    if (auto status = CheckMatrices(*layer.quantization, int8_matrices); !status.ok()) return status;
  }
  return LayerExtent{.dim = extent->dim, .hidden_dim = extent->hidden_dim, .out_dim = extent->out_dim};
}

}  // namespace

std::vector<std::pair<std::string_view, Tensor>> WeightsOf(const Layer& layer) {
  std::vector<std::pair<std::string_view, Tensor>> weights;
  ForEachRole(layer, [&](std::string_view role, const std::optional<Tensor>& tensor) {
    if (tensor) weights.emplace_back(role, *tensor);
  });
  return weights;
}

absl::Status SetWeight(Layer& layer, std::string_view role, Tensor tensor) {
  bool found = false;
  std::string roles;
  ForEachRole(layer, [&](std::string_view one, std::optional<Tensor>& member) {
    absl::StrAppend(&roles, roles.empty() ? "" : ", ", std::string(one));
    if (one != role) return;
    member = std::move(tensor);
    found = true;
  });
  if (found) return absl::OkStatus();
  return InvalidField(absl::StrCat("weights.", absl::Utf8SafeCEscape(Shortened(role))), "UNKNOWN_WEIGHT",
                      absl::StrCat("expected weights named ", roles));
}

absl::StatusOr<LayerExtent> CheckLayer(const Layer& layer) {
  auto extent = std::visit([](const auto& one) { return CheckWeights(one); }, layer);
  if (!extent.ok()) return extent;
  extent->parameters = extent->weight_bytes = 0;
  for (const auto& [role, tensor] : WeightsOf(layer)) {
    if (!IsScale(role)) extent->parameters += tensor.num_elements();
    extent->weight_bytes += static_cast<int64_t>(tensor.num_bytes());
  }
  return extent;
}

Layer OutlineOf(const Layer& layer) {
  Layer outline = layer;
  ForEachRole(outline, [](std::string_view, std::optional<Tensor>& tensor) {
    if (tensor) tensor = Tensor::WithoutData(tensor->dtype(), tensor->shape());
  });
  return outline;
}

void GatherWeights(FeedForwardWeights& weights) {
  for (const auto& [role, member] : kFeedForwardRoles) {
    if (std::optional<Tensor>& weight = weights.*member) weight = weight->Together();
  }
}

}  // namespace layerd
