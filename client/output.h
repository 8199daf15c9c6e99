// What layerctl prints: tables, JSON, errors; and the exit status that goes with an error.
#ifndef LAYERD_CLIENT_OUTPUT_H_
#define LAYERD_CLIENT_OUTPUT_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "lib/base/tensor.h"
#include "lib/reference/error_report.h"

namespace layerd {

// Exit statuses of layerctl.
inline constexpr int kExitOk = 0;
inline constexpr int kExitOutsideContract = 1;
inline constexpr int kExitUsage = 2;         // wrong usage, or a file that cannot be read or written
inline constexpr int kExitNoConnection = 3;  // the server could not be reached, or did not answer in time
inline constexpr int kExitRefused = 4;       // the server answered with an error

// Prints `status` in one line on standard error; returns kExitUsage.
int FailLocally(const absl::Status& status);
// The same for what a call to the server came back with; returns kExitNoConnection, kExitRefused, or, for an answer that is
// none, kExitOutsideContract.
int FailRemotely(const absl::Status& status);

// Named tensors of an answer, the output first.
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// {"output": {"dtype", "shape", "values"}, …, "layer_hash": "…", "report": {…}}; what there is. Values are nested as the
// shape is and have the fewest digits that give their bits again; what is not finite is "NaN", "Infinity" or "-Infinity".
std::string ToJson(const NamedTensors& tensors, const std::optional<ErrorReport>& report,
                   std::string_view layer_hash = "");

// For people: each tensor's name, dtype, shape and its first rows and columns; the hash; the report.
std::string ToTable(const NamedTensors& tensors, const std::optional<ErrorReport>& report,
                    std::string_view layer_hash = "");
std::string ToTable(const ErrorReport& report);

// `value` with three decimals; never "-0.000".
std::string ThreeDecimals(double value);

}  // namespace layerd

#endif  // LAYERD_CLIENT_OUTPUT_H_
