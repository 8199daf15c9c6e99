// layerctl plan: parameter accounting.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/commands.h"
#include "client/output.h"
#include "lib/base/shape.h"
#include "lib/layers/accounting.h"

namespace layerd {

int RunPlan(const PlanOptions& options, bool json) {
  const bool gated = options.form == FeedForwardForm::kGated;
  // CostOf() refuses a width out of range; it must not overflow here before.
  int64_t hidden_dim = options.hidden_dim.value_or(4 * std::clamp<int64_t>(options.dim, 0, kMaxDimension));
  if (!options.hidden_dim && gated) {
    const auto width = GatedHiddenDim(options.dim, options.multiple_of);
    if (!width.ok()) return FailLocally(width.status());
    hidden_dim = *width;
  }
  const auto cost = CostOf(options.form, options.dim, hidden_dim, options.biases, options.dtype, options.dtype);
  if (!cost.ok()) return FailLocally(cost.status());
  const std::pair<const char*, int64_t> kFigures[] = {{"dim", options.dim},
                                                      {"hidden_dim", hidden_dim},
                                                      {"parameters", cost->parameters},
                                                      {"flops_per_row", cost->flops_per_row},
                                                      {"weight_bytes", cost->weight_bytes},
                                                      {"activation_bytes_per_row", cost->activation_bytes_per_row}};
  const char* form = gated ? "gated" : "plain";
  std::string text = json ? absl::StrCat("{\"form\": \"", form, "\"") : absl::StrFormat("%-24s  %s\n", "form", form);
  for (const auto& [name, value] : kFigures) {
    if (json) {
      absl::StrAppend(&text, ", \"", name, "\": ", value);
    } else {
      absl::StrAppendFormat(&text, "%-24s  %d\n", name, value);
    }
  }
  std::fputs((json ? text + "}\n" : text).c_str(), stdout);
  return kExitOk;
}

}  // namespace layerd
