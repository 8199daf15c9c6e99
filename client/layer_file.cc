#include "client/layer_file.h"

#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/layer_options.h"
#include "lib/base/tensor.h"
#include "lib/weights/quantization_json.h"
#include "lib/weights/safetensors.h"
#include "lib/weights/spec_json.h"

namespace layerd {
namespace {

// Stands for the checkpoint's model, which has no name here.
constexpr char kModel[] = "file";

absl::StatusOr<std::optional<Quantization>> ReadQuantization(const SafetensorsFile& file) {
  const auto text = file.metadata().find(kQuantizationKey);
  if (text == file.metadata().end()) return std::nullopt;
  const auto json = ParseJson(text->second, kQuantizationKey, "QUANTIZATION_JSON");
  if (!json.ok()) return json.status();
  auto quantization = QuantizationFromJson(*json);
  if (!quantization.ok()) return quantization.status();
  return *std::move(quantization);
}

absl::StatusOr<Layer> ReadLayerFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return NeedOption("--prefix", "a folder has more than one layer");
  const auto file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  const auto text = file->metadata().find(kSpecKey);
  if (text == file->metadata().end()) {
    return NeedOption("--prefix", absl::StrCat("the file's metadata has no \"", kSpecKey, "\" to tell its only layer"));
  }
  const auto json = ParseJson(text->second, kSpecKey, "SPEC_JSON");
  if (!json.ok()) return json.status();
  auto layer = SpecFromJson(*json);
  if (!layer.ok()) return layer.status();
  if (auto* feed_forward = std::get_if<FeedForwardLayer>(&*layer)) {
    auto quantization = ReadQuantization(*file);
    if (!quantization.ok()) return quantization.status();
    feed_forward->quantization = *std::move(quantization);
  }
  for (const auto& [role, entry] : file->tensors()) {
    auto tensor = file->Read(role);
    if (!tensor.ok()) return tensor.status();
    if (auto status = SetWeight(*layer, role, *std::move(tensor)); !status.ok()) return status;
  }
  return layer;
}

}  // namespace

absl::StatusOr<Layer> ReadLayer(const std::string& path, const std::string& prefix, const CheckpointHints& hints) {
  if (prefix.empty()) return ReadLayerFile(path);
  const auto checkpoint = Checkpoint::Open(path, kModel, hints);
  if (!checkpoint.ok()) return checkpoint.status();
  const auto record = checkpoint->Find(prefix);
  if (!record.ok()) return record.status();
  return (*record)->Read();
}

absl::Status WriteLayerFile(const std::string& path, const Layer& layer) {
  std::map<std::string, Tensor> tensors;
  for (const auto& [role, tensor] : WeightsOf(layer)) tensors.emplace(role, tensor);
  std::map<std::string, std::string> metadata = {{kSpecKey, SpecToJson(layer).dump()}};
  const auto* feed_forward = std::get_if<FeedForwardLayer>(&layer);
  if (feed_forward != nullptr && feed_forward->quantization) {
    metadata[kQuantizationKey] = QuantizationToJson(*feed_forward->quantization).dump();
  }
  return WriteSafetensors(path, tensors, metadata);
}

}  // namespace layerd
