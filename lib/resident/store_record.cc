#include "lib/resident/store_record.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "lib/base/errors.h"
#include "lib/base/tensor.h"
#include "lib/weights/file_io.h"
#include "lib/weights/quantization_json.h"
#include "lib/weights/safetensors.h"
#include "lib/weights/spec_json.h"
#include "nlohmann/json.hpp"

namespace layerd {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
// Has int8 weights, and a quantization perhaps. What the first version can tell is written as such: other servers that use
// the store may be older.
constexpr int kInt8Version = 2;
// Hashed while a cache of the CPU still has it.
constexpr size_t kReadBytes = size_t{1} << 18;
// Absl's own format for RFC 3339 leaves out zeros at the end.
constexpr char kTimeFormat[] = "%E4Y-%m-%d%ET%H:%M:%E9SZ";

absl::Status Wrong(std::string_view field, const std::string& text) { return InvalidField(field, "RECORD", text); }

// Takes the members of an object one by one; Finish() refuses what was not asked for.
class Members {
 public:
  Members(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object.is_object()) status_ = Wrong(path_, "expected an object");
  }

  const Json* Get(const char* key) {
    ++known_;
    const auto found = status_.ok() ? object_.find(key) : object_.end();
    if (found != object_.end()) return &*found;
    Fail(key, "expected a value, got nothing");
    return nullptr;
  }

  // Null where there is none.
  const Json* Find(const char* key) {
    if (!status_.ok() || !object_.contains(key)) return nullptr;
    ++known_;
    return &object_.at(key);
  }

  std::string Text(const char* key) {
    const Json* value = Get(key);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    Fail(key, "expected a string");
    return {};
  }

  std::string Hash(const char* key) {
    std::string text = Text(key);
    if (!IsSha256(text)) Fail(key, "expected a SHA-256");
    return text;
  }

  int64_t Number(const char* key, int64_t limit) {
    const Json* value = Get(key);
    if (value != nullptr && value->is_number_unsigned() && value->get<uint64_t>() <= static_cast<uint64_t>(limit)) {
      return value->get<int64_t>();
    }
    Fail(key, absl::StrCat("expected a whole number of 0 to ", limit));
    return 0;
  }

  // The first failure counts.
  void Fail(const char* key, const std::string& text) {
    if (status_.ok()) status_ = Wrong(absl::StrCat(path_, path_.empty() ? "" : ".", key), text);
  }

  // `others` keys are somebody else's.
  absl::Status Finish(size_t others = 0) {
    if (status_.ok() && object_.size() != known_ + others) status_ = Wrong(path_, "expected no other keys");
    return status_;
  }

 private:
  const Json& object_;
  const std::string path_;
  size_t known_ = 0;
  absl::Status status_;
};

bool HasInt8(const Layer& layer) {
  const auto weights = WeightsOf(layer);
  return std::any_of(weights.begin(), weights.end(),
                     [](const auto& weight) { return weight.second.dtype() == DType::kInt8; });
}

absl::StatusOr<StoredTensor> TensorFromJson(const Json& object, int64_t size_bytes) {
  Members members(object, "weights");
  StoredTensor tensor;
  tensor.role = members.Text("role");
  const auto dtype = DTypeOfSafetensorsName(members.Text("dtype"));
  if (dtype) {
    tensor.dtype = *dtype;
  } else {
    members.Fail("dtype", "expected F32, F16, BF16 or I8");
  }
  const Json* shape = members.Get("shape");
  if (shape == nullptr || !shape->is_array()) {
    members.Fail("shape", "expected a list");
  } else {
    for (const Json& dimension : *shape) {
      if (!dimension.is_number_unsigned() || dimension.get<uint64_t>() > static_cast<uint64_t>(kMaxDimension)) {
        members.Fail("shape", "expected dimensions");
        break;
      }
      tensor.shape.push_back(dimension.get<int64_t>());
    }
  }
  tensor.end = members.Number("end", size_bytes);
  tensor.begin = members.Number("begin", tensor.end);
  tensor.sha256 = members.Hash("sha256");
  if (auto status = members.Finish(); !status.ok()) return status;
  return tensor;
}

absl::StatusOr<StoredLayer> LayerFromText(const LayerName& name, std::string_view text) {
  if (text.size() > kMaxRecordBytes) return Wrong("", absl::StrCat("expected at most ", kMaxRecordBytes, " bytes"));
  const auto record = ParseJson(text, "the record", "RECORD");
  if (!record.ok()) return record.status();
  StoredLayer layer;
  LayerInfo& info = layer.info;
  Members members(*record, "");
  // First, since another version may have other keys.
  const int64_t version = members.Number("version", std::numeric_limits<int64_t>::max());
  if (version != kVersion && version != kInt8Version) {
    members.Fail("version",
                 absl::StrCat("expected ", kVersion, " or ", kInt8Version, "; a newer server may have written this"));
  }
  info.name = members.Text("name");
  if (info.name != name.Full()) members.Fail("name", "expected the name of the file");
  info.uploaded = true;
  info.weights_sha256 = members.Hash("sha256");
  layer.size_bytes = members.Number("size_bytes", std::numeric_limits<int64_t>::max());
  const std::string content_hash = members.Hash("content_hash");
  std::string error;
  if (!absl::ParseTime(kTimeFormat, members.Text("create_time"), &info.create_time, &error)) {
    members.Fail("create_time", "expected a time as 2025-01-31T12:00:00.000000000Z");
  }
  const Json* weights = members.Get("weights");
  if (weights == nullptr || !weights->is_array()) members.Fail("weights", "expected a list");
  const Json* quantization = version == kInt8Version ? members.Find("quantization") : nullptr;
  if (auto status = members.Finish(/*others=*/1); !status.ok()) return status;
  auto outline = SpecFromJson(*record);
  if (!outline.ok()) return outline.status();
  info.outline = *std::move(outline);
  if (quantization != nullptr) {
    auto* const layer_of_matrices = std::get_if<FeedForwardLayer>(&info.outline);
    if (layer_of_matrices == nullptr) return Wrong("quantization", "expected nothing, since the layer is a norm");
    auto told = QuantizationFromJson(*quantization);
    if (!told.ok()) return told.status();
    layer_of_matrices->quantization = *std::move(told);
  }
  for (const Json& one : *weights) {
    auto tensor = TensorFromJson(one, layer.size_bytes);
    if (!tensor.ok()) return tensor.status();
    layer.tensors.push_back(*std::move(tensor));
  }
  if (auto status = Complete(layer); !status.ok()) return status;
  if (info.content_hash != content_hash) return Wrong("content_hash", "expected that of the record's other values");
  return layer;
}

}  // namespace

absl::Status LayerDamaged(std::string_view name, std::string_view text) {
  ErrorDetails details;
  details.reason = "LAYER_DAMAGED";
  details.resource_type = "layer";
  details.resource_name = Shortened(name);
  return WithDetails(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("the layer ", Quoted(name), " is damaged: ", std::string(text)), details);
}

absl::Status Complete(StoredLayer& layer) {
  LayerInfo& info = layer.info;
  std::map<std::string, std::string, std::less<>> hashes;
  for (const StoredTensor& tensor : layer.tensors) {
    const std::string field = absl::StrCat("weights.", Shortened(tensor.role));
    const auto elements = NumElements(tensor.shape);
    if (!elements.ok()) return Under(absl::StrCat(field, ".shape"), elements.status());
    if (tensor.end - tensor.begin != *elements * static_cast<int64_t>(SizeOf(tensor.dtype))) {
      return InvalidField(field, "BYTE_COUNT_MISMATCH", "expected as many bytes as its shape has");
    }
    if (!hashes.emplace(tensor.role, tensor.sha256).second) {
      return InvalidField(field, "DUPLICATE_KEY", "expected one tensor, got two");
    }
    auto status = SetWeight(info.outline, tensor.role, Tensor::WithoutData(tensor.dtype, tensor.shape));
    if (!status.ok()) return status;
    info.tensors.emplace(tensor.role, tensor.role);
  }
  const auto extent = CheckLayer(info.outline);
  if (!extent.ok()) return extent.status();
  info.extent = *extent;
  info.content_hash = ContentHash(info.outline, hashes);
  return absl::OkStatus();
}

std::string RecordText(const StoredLayer& layer) {
  const LayerInfo& info = layer.info;
  Json weights = Json::array();
  for (const StoredTensor& tensor : layer.tensors) {
    weights.push_back({{"role", tensor.role},
                       {"dtype", SafetensorsName(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"begin", tensor.begin},
                       {"end", tensor.end},
                       {"sha256", tensor.sha256}});
  }
  Json record = SpecToJson(info.outline);
  record["version"] = HasInt8(info.outline) ? kInt8Version : kVersion;
  const auto* feed_forward = std::get_if<FeedForwardLayer>(&info.outline);
  if (feed_forward != nullptr && feed_forward->quantization) {
    record["quantization"] = QuantizationToJson(*feed_forward->quantization);
  }
  record["name"] = info.name;
  record["weights"] = std::move(weights);
  record["sha256"] = info.weights_sha256;
  record["size_bytes"] = layer.size_bytes;
  record["content_hash"] = info.content_hash;
  record["create_time"] = std::string(absl::FormatTime(kTimeFormat, info.create_time, absl::UTCTimeZone()));
  return record.dump(1) + "\n";
}

StoredLayer ParseRecord(const LayerName& name, std::string_view text) {
  auto layer = LayerFromText(name, text);
  if (layer.ok()) return *std::move(layer);
  StoredLayer damaged;
  damaged.info.name = name.Full();
  damaged.info.uploaded = true;
  damaged.info.status =
      LayerDamaged(damaged.info.name, absl::StrCat("its record: ", std::string(layer.status().message())));
  return damaged;
}

absl::StatusOr<std::unique_ptr<StoreReader>> StoreReader::Open(const StoredLayer& layer, Descriptor file) {
  struct stat status;
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size != layer.size_bytes) {
    return LayerDamaged(layer.info.name,
                        absl::StrCat("expected a file of ", layer.size_bytes, " bytes for its weights"));
  }
  return std::unique_ptr<StoreReader>(new StoreReader(layer, std::move(file)));
}

StoreReader::StoreReader(const StoredLayer& layer, Descriptor file) : name_(layer.info.name), file_(std::move(file)) {
  for (const StoredTensor& tensor : layer.tensors) places_.emplace(tensor.role, Place{tensor, tensor.begin, Sha256()});
}

absl::Status StoreReader::Next(std::string_view role, absl::Span<std::byte> out) {
  Place& place = places_.find(role)->second;
  while (!out.empty()) {
    const ssize_t got = pread(file_.get(), out.data(), std::min(out.size(), kReadBytes), place.at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return LayerDamaged(
          name_, absl::StrCat("the tensor ", place.tensor.role, " cannot be read: ",
                              got == 0 ? "the file has become shorter" : std::generic_category().message(errno)));
    }
    place.hash.Update(out.subspan(0, static_cast<size_t>(got)));
    out.remove_prefix(static_cast<size_t>(got));
    place.at += got;
  }
  if (place.at == place.tensor.end && place.hash.Finish() != place.tensor.sha256) {
    return LayerDamaged(name_,
                        absl::StrCat("the tensor ", place.tensor.role, " is not what it was: its SHA-256 differs"));
  }
  return absl::OkStatus();
}

}  // namespace layerd
