// layerctl plan: parameter accounting.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/commands.h"
#include "client/output.h"
#include "lib/base/shape.h"
#include "lib/layers/accounting.h"

namespace layerd {
namespace {

struct PlanOptions {
  int64_t dim = 0;
  int64_t multiple_of = 256;
  std::optional<int64_t> hidden_dim;  // left out: 4·dim for the plain form, GatedHiddenDim() for the gated one
  FeedForwardForm form = FeedForwardForm::kGated;
  bool biases = false;
  DType dtype = DType::kFloat32;
};

int RunPlan(const PlanOptions& options, bool json) {
  const bool gated = options.form == FeedForwardForm::kGated;
  // CostOf() refuses a width out of range; it must not overflow here before.
  int64_t hidden_dim = options.hidden_dim.value_or(4 * std::clamp<int64_t>(options.dim, 0, kMaxDimension));
  if (!options.hidden_dim && gated) {
    const auto width = GatedHiddenDim(options.dim, options.multiple_of);
    if (!width.ok()) return FailLocally(width.status());
    hidden_dim = *width;
  }
  const DType activations = IsFloat(options.dtype) ? options.dtype : DType::kFloat32;
  const auto cost = CostOf(options.form, options.dim, hidden_dim, options.biases, options.dtype, activations);
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

}  // namespace

void RegisterPlan(CLI::App& app, Actions& actions) {
  const auto options = std::make_shared<PlanOptions>();
  auto* command = app.add_subcommand("plan", "parameters, FLOPs and bytes of a feed-forward layer; no server needed");
  command->add_option("--dim", options->dim, "width")->required();
  auto* hidden =
      command->add_option("--hidden", options->hidden_dim, "hidden width (plain: 4 dim; gated: 2/3 of it, rounded up)");
  command->add_option("--multiple-of", options->multiple_of, "what the gated width is rounded up to (256)")
      ->excludes(hidden);
  command->add_flag_callback(
      "--plain", [options] { options->form = FeedForwardForm::kPlain; }, "two matrices, no gate");
  command->add_flag("--biases", options->biases, "with biases");
  command->add_flag_callback(
      "--16bit", [options] { options->dtype = DType::kBFloat16; }, "2 bytes a value instead of 4");
  command
      ->add_flag_callback(
          "--int8", [options] { options->dtype = DType::kInt8; }, "matrices in 34 bytes for each 32 values")
      ->excludes("--16bit");
  actions[command] = {.run = [options](const Session& session) { return RunPlan(*options, session.json); }};
}

}  // namespace layerd
