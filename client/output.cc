#include "client/output.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/remote_engine.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"

namespace layerd {
namespace {

template <typename Float>
std::string JsonNumber(Float value) {
  if (std::isnan(value)) return "\"NaN\"";
  if (std::isinf(value)) return value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  char buffer[32];
  const std::string text(buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
  return text == "-0" ? "-0.0" : text;  // readers take "-0" for an integer, and lose the sign
}

// The values of the sub-tensor that begins at `axis`, nested; `next` counts through the elements.
void AppendValues(const Tensor& tensor, int axis, int64_t& next, std::string& to) {
  if (axis == tensor.rank()) {
    to += JsonNumber(tensor.At(next++));
    return;
  }
  to += '[';
  for (int64_t i = 0; i < tensor.dim(axis); ++i) {
    if (i > 0) to += ", ";
    AppendValues(tensor, axis + 1, next, to);
  }
  to += ']';
}

std::string JsonTensor(const Tensor& tensor) {
  std::string values;
  int64_t next = 0;
  AppendValues(tensor, 0, next, values);
  return absl::StrCat("{\"dtype\": \"", std::string(Name(tensor.dtype())), "\", \"shape\": ", ToString(tensor.shape()),
                      ", \"values\": ", values, "}");
}

std::string JsonReport(const ErrorReport& report) {
  std::string stages;
  for (const StageReport& stage : report.stages) {
    absl::StrAppend(&stages, stages.empty() ? "" : ", ", "{\"stage\": \"", stage.stage,
                    "\", \"max_abs_error\": ", JsonNumber(stage.max_abs_error),
                    ", \"max_rel_error\": ", JsonNumber(stage.max_rel_error),
                    ", \"max_ulp_error\": ", JsonNumber(stage.max_ulp_error),
                    ", \"max_error_over_bound\": ", JsonNumber(stage.max_error_over_bound), "}");
  }
  return absl::StrCat("{\"max_abs_error\": ", JsonNumber(report.max_abs_error),
                      ", \"max_rel_error\": ", JsonNumber(report.max_rel_error),
                      ", \"max_ulp_error\": ", JsonNumber(report.max_ulp_error),
                      ", \"within_contract\": ", report.within_contract ? "true" : "false", ", \"stages\": [", stages,
                      "]}");
}

int Fail(const absl::Status& status, int exit_status) {
  std::string text(status.message());
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::fprintf(stderr, "layerctl: %s: %s\n", absl::StatusCodeToString(status.code()).c_str(), text.c_str());
  return exit_status;
}

}  // namespace

int FailLocally(const absl::Status& status) { return Fail(status, kExitUsage); }

int FailRemotely(const absl::Status& status) {
  // What the server says carries a reason; what gRPC says of the connection does not.
  if (DetailsOf(status).reason == kMalformedAnswer) return Fail(status, kExitOutsideContract);
  const bool from_server = !DetailsOf(status).reason.empty();
  const bool no_answer =
      status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kDeadlineExceeded;
  return Fail(status, no_answer && !from_server ? kExitNoConnection : kExitRefused);
}

std::string ToJson(const NamedTensors& tensors, const std::optional<ErrorReport>& report, std::string_view layer_hash) {
  std::string text = "{";
  for (const auto& [name, tensor] : tensors) {
    absl::StrAppend(&text, text.size() > 1 ? ", " : "", "\"", name, "\": ", JsonTensor(tensor));
  }
  if (!layer_hash.empty()) {
    absl::StrAppend(&text, text.size() > 1 ? ", " : "", "\"layer_hash\": \"", std::string(layer_hash), "\"");
  }
  if (report) absl::StrAppend(&text, text.size() > 1 ? ", " : "", "\"report\": ", JsonReport(*report));
  return text + "}\n";
}

std::string ToTable(const NamedTensors& tensors, const std::optional<ErrorReport>& report,
                    std::string_view layer_hash) {
  constexpr int64_t kMaxRows = 16, kMaxColumns = 8;
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    absl::StrAppend(&text, name, "  ", std::string(Name(tensor.dtype())), " ", ToString(tensor.shape()), "\n");
    const int64_t columns = tensor.rank() == 0 ? 1 : tensor.shape().back();
    const int64_t rows = columns == 0 ? 0 : tensor.num_elements() / columns;
    for (int64_t row = 0; row < std::min(rows, kMaxRows); ++row) {
      for (int64_t column = 0; column < std::min(columns, kMaxColumns); ++column) {
        absl::StrAppendFormat(&text, " %12.6g", tensor.At(row * columns + column));
      }
      if (columns > kMaxColumns) absl::StrAppend(&text, "  … ", columns - kMaxColumns, " more");
      absl::StrAppend(&text, "\n");
    }
    if (rows > kMaxRows) absl::StrAppend(&text, "  … ", rows - kMaxRows, " more rows\n");
  }
  if (!layer_hash.empty()) absl::StrAppend(&text, "layer_hash  ", std::string(layer_hash), "\n");
  if (report) absl::StrAppend(&text, ToTable(*report));
  return text;
}

std::string ToTable(const ErrorReport& report) {
  std::string text =
      absl::StrFormat("%-14s %12s %12s %12s %12s\n", "stage", "max abs", "max rel", "max ulp", "of bound");
  for (const StageReport& stage : report.stages) {
    absl::StrAppendFormat(&text, "%-14s %12.4g %12.4g %12.4g %12.4g\n", stage.stage, stage.max_abs_error,
                          stage.max_rel_error, stage.max_ulp_error, stage.max_error_over_bound);
  }
  absl::StrAppendFormat(&text, "%-14s %12.4g %12.4g %12.4g\n", "end to end", report.max_abs_error, report.max_rel_error,
                        report.max_ulp_error);
  absl::StrAppend(&text, report.within_contract ? "within the contract\n" : "OUTSIDE THE CONTRACT\n");
  return text;
}

std::string ThreeDecimals(double value) {
  std::string text = absl::StrFormat("%.3f", value);
  return text == "-0.000" ? "0.000" : text;
}

}  // namespace layerd
