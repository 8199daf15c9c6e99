#include "lib/weights/safetensors.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"
#include "nlohmann/json.hpp"

namespace layerd {
namespace {

constexpr uint64_t kLengthBytes = 8;

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  auto file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  return Open(*std::move(file));
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(InputFile file) {
  const std::string source = Quoted(BaseName(file.path()));
  if (file.size() < kLengthBytes) {
    return SafetensorsDamaged(
        source, "TRUNCATED",
        absl::StrCat("the file is too short: expected at least ", kLengthBytes, " bytes, got ", file.size()));
  }
  uint64_t header_bytes;
  const absl::Status length_read =
      file.ReadAt(0, absl::MakeSpan(reinterpret_cast<std::byte*>(&header_bytes), sizeof(header_bytes)));
  if (!length_read.ok()) return length_read;
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return SafetensorsDamaged(source, "HEADER_TOO_LARGE",
                              absl::StrCat("the header is too long (or this is no safetensors file): expected at most ",
                                           kMaxSafetensorsHeaderBytes, " bytes, got ", header_bytes));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return SafetensorsDamaged(source, "TRUNCATED",
                              absl::StrCat("the file ends within its header: expected ", header_bytes,
                                           " bytes of header, got ", file.size() - kLengthBytes));
  }
  std::string json(header_bytes, ' ');
  const absl::Status json_read =
      file.ReadAt(kLengthBytes, absl::MakeSpan(reinterpret_cast<std::byte*>(json.data()), json.size()));
  if (!json_read.ok()) return json_read;
  const uint64_t data_start = kLengthBytes + header_bytes;
  auto header = ParseSafetensorsHeader(json, file.size() - data_start, source);
  if (!header.ok()) return header.status();
  return SafetensorsFile(std::make_shared<const InputFile>(std::move(file)), data_start, *std::move(header));
}

const std::string& SafetensorsFile::path() const { return file_->path(); }

bool SafetensorsFile::IsUnchanged() const { return file_->IsUnchanged(); }

const SafetensorsEntry* SafetensorsFile::Find(std::string_view name) const {
  const auto found = header_.tensors.find(name);
  return found == header_.tensors.end() ? nullptr : &found->second;
}

absl::StatusOr<const SafetensorsEntry*> SafetensorsFile::Require(std::string_view name) const {
  const std::string source = Quoted(BaseName(path()));
  const SafetensorsEntry* entry = Find(name);
  if (entry == nullptr) {
    ErrorDetails details;
    details.reason = "TENSOR_NOT_FOUND";
    details.field = "file";
    details.resource_type = "tensor";
    details.resource_name = Shortened(name);
    return WithDetails(absl::StatusCode::kNotFound,
                       absl::StrCat("file: ", source, ": there is no tensor ", Quoted(name)), details);
  }
  const auto elements = NumElements(entry->shape);
  if (!elements.ok()) {
    return SafetensorsDamaged(
        source, "SHAPE", absl::StrCat("tensor ", Quoted(name), ": shape: ", std::string(elements.status().message())));
  }
  return entry;
}

absl::Status SafetensorsFile::ReadAt(const SafetensorsEntry& entry, uint64_t offset, absl::Span<std::byte> out) const {
  return file_->ReadAt(data_start_ + entry.begin + offset, out);
}

absl::StatusOr<Tensor> SafetensorsFile::Read(std::string_view name) const {
  const auto entry = Require(name);
  if (!entry.ok()) return entry.status();
  const std::optional<DType> dtype = DTypeOfSafetensorsName((*entry)->dtype);
  if (!dtype) {
    return SafetensorsDamaged(
        Quoted(BaseName(path())), "DTYPE",
        absl::StrCat("tensor ", Quoted(name), ": layers use the dtypes F32, F16, BF16 and I8, got ", (*entry)->dtype));
  }
  Tensor tensor = Tensor::Allocate(*dtype, (*entry)->shape);
  const absl::Status read = ReadAt(**entry, 0, absl::MakeSpan(tensor.mutable_data(), tensor.num_bytes()));
  if (!read.ok()) return read;
  return tensor;
}

absl::StatusOr<std::vector<double>> SafetensorsFile::ReadDoubles(std::string_view name) const {
  const auto entry = Require(name);
  if (!entry.ok()) return entry.status();
  const std::optional<DType> dtype = DTypeOfSafetensorsName((*entry)->dtype);
  if (!dtype && (*entry)->dtype != "F64") {
    return SafetensorsDamaged(
        Quoted(BaseName(path())), "DTYPE",
        absl::StrCat("tensor ", Quoted(name), ": expected the dtype F64, F32, F16, BF16 or I8, got ", (*entry)->dtype));
  }
  const size_t element_bytes = dtype ? SizeOf(*dtype) : sizeof(double);
  std::vector<double> values(((*entry)->end - (*entry)->begin) / element_bytes);
  std::vector<std::byte> chunk(std::min<size_t>(values.size() * element_bytes, size_t{1} << 20));
  for (size_t done = 0; done < values.size();) {
    const size_t count = std::min(values.size() - done, chunk.size() / element_bytes);
    const absl::Status read =
        ReadAt(**entry, done * element_bytes, absl::MakeSpan(chunk.data(), count * element_bytes));
    if (!read.ok()) return read;
    if (dtype) {
      for (size_t i = 0; i < count; ++i) values[done + i] = LoadAsFloat(*dtype, chunk.data(), static_cast<int64_t>(i));
    } else {
      std::memcpy(values.data() + done, chunk.data(), count * element_bytes);
    }
    done += count;
  }
  return values;
}

namespace {

// `text` as a JSON string; nothing where it is not UTF-8.
std::optional<std::string> JsonString(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    return std::nullopt;
  }
}

}  // namespace

std::vector<std::pair<std::string, Tensor>> InFileOrder(const std::map<std::string, Tensor>& tensors) {
  std::vector<std::pair<std::string, Tensor>> ordered(tensors.begin(), tensors.end());
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const auto& a, const auto& b) { return SizeOf(a.second.dtype()) > SizeOf(b.second.dtype()); });
  return ordered;
}

absl::StatusOr<std::string> SafetensorsHead(absl::Span<const std::pair<std::string, Tensor>> tensors,
                                            const std::map<std::string, std::string>& metadata,
                                            std::string_view source) {
  std::string json = "{";
  if (!metadata.empty()) {
    absl::StrAppend(&json, "\"", kSafetensorsMetadataKey, "\":{");
    for (const auto& [key, value] : metadata) {
      const auto key_text = JsonString(key);
      const auto value_text = JsonString(value);
      if (!key_text || !value_text) {
        return SafetensorsDamaged(source, "METADATA", absl::StrCat("metadata ", Quoted(key), ": expected UTF-8"));
      }
      absl::StrAppend(&json, json.back() == '{' ? "" : ",", *key_text, ":", *value_text);
    }
    json += "}";
  }
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto name_text = JsonString(name);
    if (!name_text || name == kSafetensorsMetadataKey) {
      return SafetensorsDamaged(
          source, "NAME",
          absl::StrCat("tensor ", Quoted(name), ": ", name_text ? "the name is reserved" : "expected a name in UTF-8"));
    }
    const uint64_t end = offset + tensor.num_bytes();
    absl::StrAppend(&json, json.size() == 1 ? "" : ",", *name_text, ":{\"dtype\":\"", SafetensorsName(tensor.dtype()),
                    "\",\"shape\":", nlohmann::json(tensor.shape()).dump(), ",\"data_offsets\":[", offset, ",", end,
                    "]}");
    offset = end;
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > kMaxSafetensorsHeaderBytes) {
    return SafetensorsDamaged(source, "HEADER_TOO_LARGE",
                              absl::StrCat("the header is too long: expected at most ", kMaxSafetensorsHeaderBytes,
                                           " bytes, got ", json.size()));
  }
  const uint64_t header_bytes = json.size();
  return std::string(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes)) + json;
}

absl::Status WriteSafetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  const auto ordered = InFileOrder(tensors);
  const auto head = SafetensorsHead(ordered, metadata, Quoted(BaseName(path)));
  if (!head.ok()) return head.status();
  std::vector<absl::Span<const std::byte>> parts;
  parts.push_back(absl::MakeSpan(reinterpret_cast<const std::byte*>(head->data()), head->size()));
  for (const auto& [name, tensor] : ordered) parts.push_back(tensor.bytes());
  return ReplaceFile(path, parts);
}

}  // namespace layerd
