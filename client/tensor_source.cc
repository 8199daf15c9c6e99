#include "client/tensor_source.h"

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/weights/npy.h"
#include "lib/weights/safetensors.h"

namespace layerd {
namespace {

using nlohmann::json;

std::optional<double> NumberOf(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  const std::string& text = value.get_ref<const std::string&>();
  if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

// Appends the numbers of `value`, whose nesting must have the sizes in `shape` from `depth` on.
absl::Status Flatten(const json& value, const Shape& shape, size_t depth, std::vector<float>& to) {
  if (depth == shape.size()) {
    const auto number = NumberOf(value);
    if (!number) {
      return absl::InvalidArgumentError(absl::StrCat("expected a number in the list, got ", Shortened(value.dump())));
    }
    to.push_back(static_cast<float>(*number));
    if (std::isfinite(*number) && !std::isfinite(to.back())) {
      return absl::InvalidArgumentError(absl::StrCat("expected numbers that fit float32, got ", value.dump()));
    }
    return absl::OkStatus();
  }
  if (!value.is_array() || static_cast<int64_t>(value.size()) != shape[depth]) {
    return absl::InvalidArgumentError(absl::StrCat("expected lists of equal length, ", ToString(shape), ", got ",
                                                   Shortened(value.dump()), " at depth ", depth));
  }
  for (const json& element : value) {
    if (auto status = Flatten(element, shape, depth + 1, to); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensor> ParseTyped(std::string_view text, DType dtype) {
  // The reader takes "-0" for an integer, and so for +0.
  static const std::regex kMinusZero("([\\[,\\s])-0(?=[,\\]\\s])");
  const std::string exact = std::regex_replace(std::string(text), kMinusZero, "$1-0.0");
  const json value = json::parse(exact, nullptr, /*allow_exceptions=*/false);
  if (!value.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a list of numbers such as [0.5, -1.5], got ", Shortened(text)));
  }
  Shape shape;
  for (const json* level = &value; level->is_array(); level = &level->front()) {
    if (shape.size() == kMaxRank) {
      return absl::InvalidArgumentError(absl::StrCat("expected at most ", kMaxRank, " nested lists"));
    }
    shape.push_back(static_cast<int64_t>(level->size()));
    if (level->empty()) break;
  }
  std::vector<float> numbers;
  if (auto status = Flatten(value, shape, 0, numbers); !status.ok()) return status;
  return Tensor::FromFloats(dtype, std::move(shape), numbers);
}

// Parts of "FILE.safetensors:NAME".
std::optional<std::pair<std::string, std::string>> SplitSafetensors(std::string_view text) {
  constexpr std::string_view kEnding = ".safetensors";
  const size_t at = text.rfind(kEnding);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = text.substr(at + kEnding.size());
  if (!rest.empty() && rest.front() != ':') return std::nullopt;
  return std::pair(std::string(text.substr(0, at + kEnding.size())), std::string(rest.empty() ? rest : rest.substr(1)));
}

bool IsNpy(std::string_view text) { return text.size() > 4 && text.substr(text.size() - 4) == ".npy"; }

}  // namespace

absl::StatusOr<Tensor> ReadTensor(std::string_view text, DType typed_dtype) {
  const size_t first = text.find_first_not_of(" \t\n");
  if (first != std::string_view::npos && text[first] == '[') return ParseTyped(text, typed_dtype);
  if (IsNpy(text)) return ReadNpy(std::string(text));
  if (const auto parts = SplitSafetensors(text)) {
    if (parts->second.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("expected FILE.safetensors:NAME, got no name in ", Shortened(text)));
    }
    const auto file = SafetensorsFile::Open(parts->first);
    if (!file.ok()) return file.status();
    return file->Read(parts->second);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("expected FILE.npy, FILE.safetensors:NAME or a list [...], got ", Shortened(text)));
}

absl::Status CheckWritable(std::string_view text) {
  if (IsNpy(text) || SplitSafetensors(text)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected FILE.npy or FILE.safetensors[:NAME], got ", Shortened(text)));
}

absl::Status WriteTensor(std::string_view text, const Tensor& tensor) {
  if (auto status = CheckWritable(text); !status.ok()) return status;
  if (IsNpy(text)) return WriteNpy(std::string(text), tensor);
  const auto [file, name] = *SplitSafetensors(text);
  return WriteSafetensors(file, std::map<std::string, Tensor>{{name.empty() ? "output" : name, tensor}});
}

}  // namespace layerd
