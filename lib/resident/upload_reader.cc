#include "lib/resident/upload_reader.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "lib/base/errors.h"
#include "lib/base/tensor.h"
#include "lib/weights/safetensors.h"

namespace layerd {
namespace {

constexpr int64_t kLengthBytes = 8;

// The caller knows the options, which CheckLayer() calls the spec, as fields of the header.
absl::Status InTermsOfHeader(const Layer& layer, const absl::Status& status) {
  constexpr char kSpec[] = "spec.";
  const bool norm = std::holds_alternative<NormalizeLayer>(layer);
  const std::string header = norm ? "header.normalize." : "header.feed_forward.";
  ErrorDetails details = DetailsOf(status);
  if (details.field.rfind("quantization", 0) == 0) return Under("header", status);
  details.field = absl::StrReplaceAll(details.field, {{kSpec, header}});
  return WithDetails(status.code(), absl::StrReplaceAll(status.message(), {{kSpec, header}}), details);
}

// The caller knows the file as its chunks.
absl::Status InTermsOfChunks(const absl::Status& status) {
  constexpr std::string_view kField = "file: ";
  std::string_view text(status.message().data(), status.message().size());
  if (text.substr(0, kField.size()) == kField) text.remove_prefix(kField.size());
  return InvalidField("chunk", DetailsOf(status).reason, text);
}

}  // namespace

Layer OptionsOf(const Layer& layer) {
  return std::visit(
      [](const auto& one) {
        std::decay_t<decltype(one)> options = one;
        options.weights = {};
        return Layer(std::move(options));
      },
      layer);
}

absl::Status CheckOptions(const Layer& options) {
  Layer layer = OptionsOf(options);
  if (auto* norm = std::get_if<NormalizeLayer>(&layer)) {
    // Any size that the groups divide will do.
    const int64_t group_size = norm->spec.group_size;
    if (group_size < 0 || group_size > kMaxDimension) {
      return InvalidField("header.normalize.group_size", "OUT_OF_RANGE",
                          absl::StrCat("expected 0 to ", kMaxDimension, ", got ", group_size));
    }
    norm->weights.gamma = Tensor::WithoutData(DType::kFloat32, {std::max<int64_t>(group_size, 1)});
  }
  const auto extent = CheckLayer(layer);
  // A feed-forward layer's options are looked at before its weights, which are not there.
  const bool good = extent.ok() || DetailsOf(extent.status()).field.rfind("weights.", 0) == 0;
  return good ? absl::OkStatus() : InTermsOfHeader(layer, extent.status());
}

UploadReader::UploadReader(Layer options, int64_t size_bytes) {
  layer_.info.uploaded = true;
  layer_.info.outline = std::move(options);
  layer_.size_bytes = size_bytes;
}

absl::Status UploadReader::Take(absl::Span<const std::byte> bytes) {
  if (static_cast<int64_t>(bytes.size()) > layer_.size_bytes - taken_) {
    return InvalidField("chunk", "TOO_MANY_BYTES",
                        absl::StrCat("expected no more than header.size_bytes in all, which is ", layer_.size_bytes));
  }
  hash_.Update(bytes);
  taken_ += static_cast<int64_t>(bytes.size());
  while (!in_data_ && !bytes.empty()) {
    const size_t count = std::min(bytes.size(), static_cast<size_t>(head_bytes_) - head_.size());
    head_.append(reinterpret_cast<const char*>(bytes.data()), count);
    bytes.remove_prefix(count);
    if (static_cast<int64_t>(head_.size()) < head_bytes_) continue;
    if (auto status = head_bytes_ == kLengthBytes ? CheckLength() : CheckHeader(); !status.ok()) return status;
  }
  HashTensors(bytes);
  return absl::OkStatus();
}

absl::Status UploadReader::CheckLength() {
  uint64_t length;
  std::memcpy(&length, head_.data(), sizeof(length));
  const auto limit = std::min(static_cast<uint64_t>(layer_.size_bytes - kLengthBytes), kMaxSafetensorsHeaderBytes);
  if (length < 2 || length > limit) {
    return InvalidField("chunk", "SAFETENSORS_HEADER_LENGTH",
                        absl::StrCat("expected a header of 2 to ", limit,
                                     " bytes (or this is no safetensors file), got a length of ", length));
  }
  head_bytes_ += static_cast<int64_t>(length);
  return absl::OkStatus();
}

absl::Status UploadReader::CheckHeader() {
  const auto data_bytes = static_cast<uint64_t>(layer_.size_bytes - head_bytes_);
  const auto header = ParseSafetensorsHeader(std::string_view(head_).substr(kLengthBytes), data_bytes, "the upload");
  if (!header.ok()) return InTermsOfChunks(header.status());
  std::string().swap(head_);
  for (const auto& [role, entry] : header->tensors) {
    const auto dtype = DTypeOfSafetensorsName(entry.dtype);
    if (!dtype) {
      return InvalidField(absl::StrCat("weights.", Shortened(role), ".dtype"), "DTYPE",
                          absl::StrCat("expected F32, F16, BF16 or I8, got ", entry.dtype));
    }
    layer_.tensors.push_back({.role = role,
                              .dtype = *dtype,
                              .shape = entry.shape,
                              .begin = head_bytes_ + static_cast<int64_t>(entry.begin),
                              .end = head_bytes_ + static_cast<int64_t>(entry.end)});
  }
  if (auto status = Complete(layer_); !status.ok()) return InTermsOfHeader(layer_.info.outline, status);
  // Now that no tensor is empty, their bytes have one order.
  std::sort(layer_.tensors.begin(), layer_.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.begin < b.begin; });
  in_data_ = true;
  return absl::OkStatus();
}

// `bytes` are the last ones that were taken.
void UploadReader::HashTensors(absl::Span<const std::byte> bytes) {
  while (!bytes.empty()) {
    StoredTensor& tensor = layer_.tensors[tensor_];
    const int64_t at = taken_ - static_cast<int64_t>(bytes.size());
    const size_t count = std::min(bytes.size(), static_cast<size_t>(tensor.end - at));
    tensor_hash_.Update(bytes.subspan(0, count));
    bytes.remove_prefix(count);
    if (at + static_cast<int64_t>(count) < tensor.end) return;
    tensor.sha256 = tensor_hash_.Finish();
    tensor_hash_ = Sha256();
    ++tensor_;
  }
}

absl::StatusOr<StoredLayer> UploadReader::Finish() {
  if (taken_ != layer_.size_bytes) {
    return InvalidField(
        "chunk", "BYTE_COUNT_MISMATCH",
        absl::StrCat("expected ", layer_.size_bytes, " bytes in all, as header.size_bytes says, got ", taken_));
  }
  layer_.info.weights_sha256 = hash_.Finish();
  if (auto status = Complete(layer_); !status.ok()) return status;
  return std::move(layer_);
}

}  // namespace layerd
