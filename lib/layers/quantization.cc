#include "lib/layers/quantization.h"

#include <cmath>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

absl::Status Wrong(std::string_view field, const std::string& text) {
  return InvalidField(absl::StrCat("quantization", std::string(field)), "QUANTIZATION", text);
}

bool IsError(double value) { return std::isfinite(value) && value >= 0; }

absl::Status CheckNotNegative(std::string_view field, int64_t value) {
  return value >= 0 ? absl::OkStatus() : Wrong(field, absl::StrCat("expected 0 or more, got ", value));
}

std::string Printable(std::string_view text) { return absl::Utf8SafeCEscape(Shortened(text)); }

}  // namespace

absl::Status CheckFigures(const Quantization& quantization) {
  const std::string& hash = quantization.source_hash;
  if (hash.size() != 64 || hash.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return Wrong(".source_hash",
                 absl::StrCat("expected 64 hexadecimal digits in lower case, got \"", Printable(hash), "\""));
  }
  for (const MatrixError& one : quantization.matrices) {
    if (!IsError(one.relative_rms_error) || !IsError(one.max_abs_error)) {
      return Wrong(".matrices", absl::StrCat("expected finite errors of 0 or more for ", Printable(one.role), ", got ",
                                             one.relative_rms_error, " and ", one.max_abs_error));
    }
  }
  if (const double error = quantization.output_relative_rms_error.value_or(0); !IsError(error)) {
    return Wrong(".output_relative_rms_error", absl::StrCat("expected a finite number of 0 or more, got ", error));
  }
  if (auto status = CheckNotNegative(".rows", quantization.rows); !status.ok()) return status;
  return CheckNotNegative(".seed", quantization.seed);
}

absl::Status CheckMatrices(const Quantization& quantization, absl::Span<const std::string_view> int8_matrices) {
  if (int8_matrices.empty()) return Wrong("", "expected nothing, since the layer has no int8 matrix");
  std::string expected, got;
  for (const std::string_view role : int8_matrices) absl::StrAppend(&expected, " ", std::string(role));
  for (const MatrixError& one : quantization.matrices) absl::StrAppend(&got, " ", one.role);
  if (got == expected) return absl::OkStatus();
  return Wrong(".matrices", absl::StrCat("expected the layer's int8 matrices,", expected, ", got",
                                         got.empty() ? " nothing" : Printable(got)));
}

}  // namespace layerd
