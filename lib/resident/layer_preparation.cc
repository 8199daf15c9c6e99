#include "lib/resident/layer_preparation.h"

#include <exception>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <utility>

#include "lib/base/errors.h"
#include "lib/weights/layer_hash.h"

namespace layerd {
namespace {

// What all weights of the layer keep alive: they are freed before the claim on their memory is given back.
template <typename Weights>
struct Owned {
  LayerMemory::Claim claim;
  Weights weights;
};

absl::Status TakeNorm(const LayerRecord& record, LayerMemory::Claim claim, PreparedLayer& prepared) {
  auto layer = record.Read();
  if (!layer.ok()) return std::move(layer).status();
  const std::shared_ptr<Owned<Layer>> owned(new Owned<Layer>{std::move(claim), *std::move(layer)});
  prepared.layer = owned->weights;
  for (const auto& [role, tensor] : WeightsOf(owned->weights)) {
    auto adopted = Tensor::Adopt(tensor.dtype(), tensor.shape(), owned, tensor.bytes());
    if (!adopted.ok()) return std::move(adopted).status();
    if (auto status = SetWeight(prepared.layer, role, *std::move(adopted)); !status.ok()) return status;
  }
  if (prepared.content_hash.empty()) prepared.content_hash = ContentHash(prepared.layer);
  return absl::OkStatus();
}

absl::Status TakeFeedForward(const LayerRecord& record, const Arena& arena, LayerMemory::Claim claim,
                             PreparedLayer& prepared) {
  const auto& layer = std::get<FeedForwardLayer>(prepared.layer);
  const std::shared_ptr<Owned<PackedFeedForward>> owned(
      new Owned<PackedFeedForward>{std::move(claim), PackedFeedForward(layer.spec, layer.weights)});
  std::map<std::string, Sha256, std::less<>> hashing;
  if (prepared.content_hash.empty()) {
    for (const auto& [role, weight] : WeightsOf(prepared.layer)) hashing.emplace(role, Sha256());
  }
  auto status = ReadPieces(record, arena, [&](const WeightPiece& piece) {
    // Each while a cache of the CPU still has it.
    if (const auto hash = hashing.find(piece.role); hash != hashing.end()) hash->second.Update(piece.bytes);
    owned->weights.Put(piece.role, piece.first_row, piece.rows, piece.bytes.data());
  });
  if (!status.ok()) return status;
  prepared.packed = {owned, &owned->weights};
  if (prepared.content_hash.empty()) {
    std::map<std::string, std::string, std::less<>> hashes;
    for (auto& [role, hash] : hashing) hashes.emplace(role, hash.Finish());
    prepared.content_hash = ContentHash(prepared.layer, hashes);
  }
  return absl::OkStatus();
}

}  // namespace

int64_t PreparedBytes(const LayerInfo& info) {
  const auto* layer = std::get_if<FeedForwardLayer>(&info.outline);
  return layer == nullptr ? info.extent.weight_bytes : PackedFeedForward::BytesOf(layer->spec, layer->weights);
}

absl::StatusOr<std::shared_ptr<const PreparedLayer>> PrepareLayer(const LayerRecord& record, const Arena& arena,
                                                                  LayerMemory::Claim claim) {
  const LayerInfo& info = record.info();
  try {
    auto prepared = std::make_shared<PreparedLayer>();
    prepared->name = info.name;
    prepared->layer = info.outline;
    prepared->extent = info.extent;
    prepared->memory_bytes = PreparedBytes(info);
    // Uploads are read by the hashes of their records.
    prepared->content_hash = info.content_hash;
    auto status = std::holds_alternative<FeedForwardLayer>(info.outline)
                      ? TakeFeedForward(record, arena, std::move(claim), *prepared)
                      : TakeNorm(record, std::move(claim), *prepared);
    if (!status.ok()) return status;
    return std::shared_ptr<const PreparedLayer>(std::move(prepared));
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  } catch (const std::exception& error) {
    return InternalError(error.what());
  }
}

}  // namespace layerd
