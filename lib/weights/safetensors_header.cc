#include "lib/weights/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"
#include "nlohmann/json.hpp"

namespace layerd {
namespace {

struct FormatDType {
  std::string_view name;
  int bits;
};
constexpr std::array<FormatDType, 22> kFormatDTypes = {{
    {"F64", 64},    {"F32", 32},        {"F16", 16},        {"BF16", 16},   {"F8_E4M3", 8}, {"F8_E5M2", 8},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
    {"I64", 64},    {"I32", 32},        {"I16", 16},        {"I8", 8},      {"U64", 64},    {"U32", 32},
    {"U16", 16},    {"U8", 8},          {"BOOL", 8},        {"C64", 64},
}};

int BitsOf(std::string_view dtype) {
  for (const FormatDType& known : kFormatDTypes) {
    if (known.name == dtype) return known.bits;
  }
  return 0;
}

// Builds a SafetensorsHeader from nlohmann's events. Nesting needs no stack: the format has three levels, and anything
// deeper is refused where it begins. Every method returns false to stop; status() then says why.
class HeaderHandler {
 public:
  using Json = nlohmann::json;

  explicit HeaderHandler(std::string_view source) : source_(source) {}

  const absl::Status& status() const { return status_; }
  SafetensorsHeader& header() { return header_; }

  bool start_object(size_t) {
    if (where_ == Where::kStart) return Enter(Where::kTop);
    if (where_ != Where::kTop) return Unexpected("an object");
    entry_ = {};
    seen_ = {};
    return Enter(name_ == kSafetensorsMetadataKey ? Where::kMetadata : Where::kEntry);
  }

  bool key(std::string& key) {
    switch (where_) {
      case Where::kTop:
        if (key == kSafetensorsMetadataKey ? std::exchange(has_metadata_, true) : header_.tensors.count(key) > 0) {
          return Fail("DUPLICATE_KEY", absl::StrCat("the header has the key ", Quoted(key), " twice"));
        }
        name_ = std::move(key);
        return true;
      case Where::kMetadata:
        if (header_.metadata.count(key) > 0) {
          return Fail("DUPLICATE_KEY", absl::StrCat("__metadata__ has the key ", Quoted(key), " twice"));
        }
        metadata_key_ = std::move(key);
        return true;
      default:  // kEntry
        for (size_t i = 0; i < kFields.size(); ++i) {
          if (key != kFields[i]) continue;
          if (std::exchange(seen_[i], true)) {
            return Fail("DUPLICATE_KEY", absl::StrCat(Subject(), "the key ", Quoted(key), " stands there twice"));
          }
          field_ = i;
          return true;
        }
        return Fail("UNKNOWN_KEY",
                    absl::StrCat(Subject(), "expected the keys dtype, shape and data_offsets, got ", Quoted(key)));
    }
  }

  bool end_object() {
    if (where_ == Where::kEntry) {
      for (size_t i = 0; i < kFields.size(); ++i) {
        if (!seen_[i]) return Fail("MISSING_KEY", absl::StrCat(Subject(), "no ", kFields[i]));
      }
      if (!CheckSize()) return false;
      header_.tensors.emplace(std::move(name_), std::move(entry_));
      name_.clear();
    }
    return Enter(where_ == Where::kTop ? Where::kStart : Where::kTop);
  }

  bool start_array(size_t) {
    if (where_ != Where::kEntry || field_ == kDType) return Unexpected("a list");
    offsets_count_ = 0;
    return Enter(field_ == kShape ? Where::kShape : Where::kOffsets);
  }

  bool end_array() {
    if (where_ == Where::kOffsets && offsets_count_ != 2) {
      return Fail("OFFSETS", absl::StrCat(Subject(), "data_offsets: expected 2 numbers, got ", offsets_count_));
    }
    return Enter(Where::kEntry);
  }

  bool number_unsigned(uint64_t value) {
    if (where_ == Where::kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Fail("SHAPE", absl::StrCat(Subject(), "shape: the dimension is too large: ", value));
      }
      if (entry_.shape.size() == kMaxSafetensorsRank) {
        return Fail("SHAPE", absl::StrCat(Subject(), "shape: expected at most ", kMaxSafetensorsRank, " dimensions"));
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (where_ == Where::kOffsets) {
      if (offsets_count_ == 2) {
        return Fail("OFFSETS", absl::StrCat(Subject(), "data_offsets: expected 2 numbers, got more"));
      }
      (offsets_count_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return Unexpected("a number");
  }

  bool string(std::string& value) {
    if (where_ == Where::kMetadata) {
      header_.metadata.emplace(std::move(metadata_key_), std::move(value));
      return true;
    }
    if (where_ != Where::kEntry || field_ != kDType) return Unexpected("a string");
    if (BitsOf(value) == 0) {
      return Fail("DTYPE", absl::StrCat(Subject(), "dtype: the format has no dtype ", Quoted(value)));
    }
    entry_.dtype = std::move(value);
    return true;
  }

  bool number_integer(int64_t value) { return Unexpected(absl::StrCat("the negative number ", value)); }
  bool number_float(double, const std::string& text) {
    return Unexpected(absl::StrCat("the number ", Shortened(text)));
  }
  bool boolean(bool value) { return Unexpected(value ? "true" : "false"); }
  bool null() { return Unexpected("null"); }
  bool binary(std::vector<uint8_t>&) { return Unexpected("bytes"); }

  bool parse_error(size_t position, const std::string& last_token, const nlohmann::detail::exception&) {
    return Fail("HEADER_JSON",
                absl::StrCat("the header is not JSON: at its byte ", position, ", near ", Quoted(last_token)));
  }

 private:
  enum class Where : uint8_t { kStart, kTop, kMetadata, kEntry, kShape, kOffsets };
  static constexpr std::array<const char*, 3> kFields = {"dtype", "shape", "data_offsets"};
  static constexpr size_t kDType = 0, kShape = 1;

  bool Enter(Where where) {
    where_ = where;
    return true;
  }

  bool Fail(std::string_view reason, const std::string& text) {
    status_ = SafetensorsDamaged(source_, reason, text);
    return false;
  }

  std::string Subject() const { return absl::StrCat("tensor ", Quoted(name_), ": "); }

  bool Unexpected(const std::string& got) {
    switch (where_) {
      case Where::kStart:
        return Fail("HEADER_FORM", absl::StrCat("the header: expected one object, got ", got));
      case Where::kTop:
        return Fail(name_ == kSafetensorsMetadataKey ? "METADATA" : "HEADER_FORM",
                    absl::StrCat(Quoted(name_), ": expected an object, got ", got));
      case Where::kMetadata:
        return Fail("METADATA",
                    absl::StrCat("__metadata__: ", Quoted(metadata_key_), ": expected a string, got ", got));
      case Where::kShape:
        return Fail("SHAPE", absl::StrCat(Subject(), "shape: expected whole numbers of 0 or more, got ", got));
      case Where::kOffsets:
        return Fail("OFFSETS", absl::StrCat(Subject(), "data_offsets: expected whole numbers of 0 or more, got ", got));
      case Where::kEntry:
        break;
    }
    if (field_ == kDType) return Fail("DTYPE", absl::StrCat(Subject(), "dtype: expected a string, got ", got));
    return Fail(field_ == kShape ? "SHAPE" : "OFFSETS",
                absl::StrCat(Subject(), kFields[field_], ": expected a list of whole numbers, got ", got));
  }

  // The shape and dtype of the entry that just ended fit its offsets.
  bool CheckSize() {
    if (entry_.end < entry_.begin) {
      return Fail("OFFSETS", absl::StrCat(Subject(), "data_offsets: expected an end of at least ", entry_.begin,
                                          ", got ", entry_.end));
    }
    uint64_t bits = static_cast<uint64_t>(BitsOf(entry_.dtype));
    for (const int64_t dimension : entry_.shape) {
      if (__builtin_mul_overflow(bits, static_cast<uint64_t>(dimension), &bits)) {
        return Fail("SHAPE", absl::StrCat(Subject(), "the shape has too many elements: ", ToString(entry_.shape)));
      }
    }
    if (bits % 8 != 0 || bits / 8 != entry_.end - entry_.begin) {
      return Fail("BYTE_COUNT", absl::StrCat(Subject(), "expected ", bits / 8, bits % 8 != 0 ? " and a fraction" : "",
                                             " bytes for ", entry_.dtype, " ", ToString(entry_.shape),
                                             ", got data_offsets of ", entry_.end - entry_.begin));
    }
    return true;
  }

  const std::string_view source_;
  absl::Status status_;
  SafetensorsHeader header_;
  Where where_ = Where::kStart;
  bool has_metadata_ = false;
  std::string name_;          // of the entry, in kTop and below
  std::string metadata_key_;  // in kMetadata
  size_t field_ = 0;          // in kEntry and below
  std::array<bool, 3> seen_{};
  size_t offsets_count_ = 0;
  SafetensorsEntry entry_;
};

// The tensors cover the data exactly once.
absl::Status CheckCoverage(const SafetensorsHeader& header, uint64_t data_bytes, std::string_view source) {
  using Item = std::pair<const std::string, SafetensorsEntry>;
  std::vector<const Item*> items;
  items.reserve(header.tensors.size());
  for (const Item& item : header.tensors) items.push_back(&item);
  // Empty tensors lie where another begins, so they sort before it.
  std::sort(items.begin(), items.end(), [](const Item* a, const Item* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t covered = 0;
  for (const Item* item : items) {
    if (item->second.begin != covered) {
      return SafetensorsDamaged(
          source, "OFFSETS",
          absl::StrCat("tensor ", Quoted(item->first), ": ",
                       item->second.begin < covered ? "overlaps another" : "leaves a hole before it",
                       ": expected data_offsets from ", covered, ", got ", item->second.begin));
    }
    covered = item->second.end;
  }
  if (covered == data_bytes) return absl::OkStatus();
  return SafetensorsDamaged(
      source, covered > data_bytes ? "TRUNCATED" : "OFFSETS",
      absl::StrCat(items.empty() ? std::string("no tensor")
                                 : absl::StrCat("tensor ", Quoted(items.back()->first), ", the last,"),
                   " ends where the data does not: expected ", covered, " bytes of data, got ", data_bytes));
}

}  // namespace

absl::Status SafetensorsDamaged(std::string_view source, std::string_view reason, const std::string& text) {
  return InvalidField("file", absl::StrCat("SAFETENSORS_", std::string(reason)),
                      absl::StrCat(std::string(source), ": ", text));
}

const char* SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kFloat16:
      return "F16";
    case DType::kBFloat16:
      return "BF16";
    case DType::kInt8:
      return "I8";
  }
  return "unknown";
}

std::optional<DType> DTypeOfSafetensorsName(std::string_view name) {
  if (name == "F32") return DType::kFloat32;
  if (name == "F16") return DType::kFloat16;
  if (name == "BF16") return DType::kBFloat16;
  if (name == "I8") return DType::kInt8;
  return std::nullopt;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes,
                                                         std::string_view source) {
  if (json.size() > kMaxSafetensorsHeaderBytes) {
    return SafetensorsDamaged(source, "HEADER_TOO_LARGE",
                              absl::StrCat("the header is too long: expected at most ", kMaxSafetensorsHeaderBytes,
                                           " bytes, got ", json.size()));
  }
  if (json.empty() || json.front() != '{') {
    return SafetensorsDamaged(source, "HEADER_JSON",
                              absl::StrCat("the header: expected '{' as its first byte, got ",
                                           json.empty() ? std::string("no bytes") : Quoted(json.substr(0, 1))));
  }
  // nlohmann takes a NUL for the end of the input and would not look at what follows.
  const size_t nul = json.find('\0');
  if (nul != std::string_view::npos) {
    return SafetensorsDamaged(source, "HEADER_JSON",
                              absl::StrCat("the header is not JSON: a NUL after ", nul, " bytes"));
  }
  HeaderHandler handler(source);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return handler.status().ok() ? SafetensorsDamaged(source, "HEADER_JSON", "the header is not JSON")
                                 : handler.status();
  }
  const absl::Status coverage = CheckCoverage(handler.header(), data_bytes, source);
  if (!coverage.ok()) return coverage;
  return std::move(handler.header());
}

}  // namespace layerd
