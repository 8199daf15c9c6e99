#include "lib/resident/layer_bytes.h"

#include <algorithm>

#include "lib/layers/layer.h"
#include "lib/weights/safetensors.h"

namespace layerd {

absl::StatusOr<LayerBytes> LayerBytes::Of(std::shared_ptr<const PreparedLayer> layer) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& [role, weight] : WeightsOf(layer->layer)) tensors.emplace_back(role, weight);
  auto head = SafetensorsHead(tensors, {}, layer->name);
  if (!head.ok()) return head.status();
  return LayerBytes(std::move(layer), *std::move(head));
}

LayerBytes::LayerBytes(std::shared_ptr<const PreparedLayer> layer, std::string head)
    : layer_(std::move(layer)),
      head_(std::move(head)),
      weights_(WeightsOf(layer_->layer)),
      size_bytes_(static_cast<int64_t>(head_.size()) + layer_->extent.weight_bytes) {}

absl::Span<const std::byte> LayerBytes::Next(size_t max_bytes) {
  if (rest_.empty()) rest_ = NextPiece(max_bytes);
  const auto next = rest_.subspan(0, max_bytes);
  rest_.remove_prefix(next.size());
  return next;
}

absl::Span<const std::byte> LayerBytes::NextPiece(size_t max_bytes) {
  if (!std::exchange(begun_, true)) return {reinterpret_cast<const std::byte*>(head_.data()), head_.size()};
  if (weight_ == weights_.size()) return {};
  const auto& [role, weight] = weights_[weight_];
  if (layer_->packed == nullptr) {
    ++weight_;
    return weight.bytes();
  }
  const int64_t all = weight.dim(0), first = row_;
  const size_t row_bytes = weight.num_bytes() / all;
  const int64_t rows = std::clamp<int64_t>(static_cast<int64_t>(max_bytes / row_bytes), 1, all - first);
  piece_.resize(rows * row_bytes);
  layer_->packed->Get(role, first, rows, piece_.data());
  row_ += rows;
  if (row_ == all) {
    ++weight_;
    row_ = 0;
  }
  return piece_;
}

}  // namespace layerd
