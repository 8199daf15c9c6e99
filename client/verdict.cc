#include "client/verdict.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/remote_engine.h"
#include "lib/base/shape.h"
#include "lib/reference/judge.h"

namespace layerd {
namespace {

// Judging indexes an answer by the call's shapes: they must fit before it begins.
absl::Status ExpectShape(std::string_view name, const std::optional<Tensor>& tensor, const Shape& shape, DType dtype) {
  if (!tensor) return MalformedAnswer(absl::StrCat("has no ", std::string(name)));
  if (tensor->shape() != shape || tensor->dtype() != dtype) {
    return MalformedAnswer(absl::StrCat("has ", std::string(name), " as ", std::string(Name(tensor->dtype())), " ",
                                        ToString(tensor->shape()), ", expected ", std::string(Name(dtype)), " ",
                                        ToString(shape)));
  }
  return absl::OkStatus();
}

// Asks `call` and judges the answer by `spec` and `inputs`, which are what it computes.
absl::StatusOr<Verdict> Judged(LayerEngine& engine, const NormalizeCall& call, const NormalizeSpec& spec,
                               const NormalizeInputs& inputs) {
  auto result = Normalize(engine, call);
  if (!result.ok()) return result.status();
  if (call.verify && !result->report) return MalformedAnswer("has no report");
  if (auto extent = CheckNormalize(spec, inputs); !extent.ok()) return extent.status();
  const Tensor& input = inputs.input;
  const DType dtype = call.output_dtype.value_or(input.dtype());
  if (auto status = ExpectShape("output", result->outputs.output, input.shape(), dtype); !status.ok()) return status;
  if (inputs.residual) {
    if (auto status = ExpectShape("residual_sum", result->outputs.residual_sum, input.shape(), input.dtype());
        !status.ok()) {
      return status;
    }
  }
  return Verdict{std::move(result->report), JudgeNormalize(spec, inputs, result->outputs),
                 std::move(result->layer_hash)};
}

absl::StatusOr<Verdict> Judged(LayerEngine& engine, const FeedForwardCall& call, const FeedForwardSpec& spec,
                               const FeedForwardWeights& weights) {
  auto result = FeedForward(engine, call);
  if (!result.ok()) return result.status();
  if (call.verify && !result->report) return MalformedAnswer("has no report");
  const auto extent = CheckFeedForward(spec, weights, call.input);
  if (!extent.ok()) return extent.status();
  Shape inside = call.input.shape(), outside = call.input.shape();
  inside.back() = extent->hidden_dim;
  outside.back() = extent->out_dim;
  const FeedForwardOutputs& outputs = result->outputs;
  const bool gated = spec.form == FeedForwardForm::kGated;
  for (const auto& status :
       {ExpectShape("output", outputs.output, outside, call.output_dtype.value_or(call.input.dtype())),
        gated ? ExpectShape("gate", outputs.gate, inside, DType::kFloat32) : absl::OkStatus(),
        ExpectShape("up", outputs.up, inside, DType::kFloat32),
        ExpectShape("hidden", outputs.hidden, inside, DType::kFloat32),
        spec.inner_norm ? ExpectShape("normed", outputs.normed, inside, DType::kFloat32) : absl::OkStatus()}) {
    if (!status.ok()) return status;
  }
  return Verdict{std::move(result->report), JudgeFeedForward(spec, weights, call.input, outputs),
                 std::move(result->layer_hash)};
}

}  // namespace

absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, const NormalizeCall& call) {
  return Judged(engine, call, call.spec, call.inputs);
}

absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, FeedForwardCall call) {
  call.intermediates = true;  // each stage is judged on what it really consumed
  return Judged(engine, call, call.spec, call.weights);
}

absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, const NormalizeCall& call, const NormalizeLayer& layer) {
  NormalizeInputs inputs = call.inputs;
  inputs.gamma = layer.weights.gamma;
  inputs.beta = layer.weights.beta;
  return Judged(engine, call, layer.spec, inputs);
}

absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, FeedForwardCall call, const FeedForwardLayer& layer) {
  call.intermediates = true;
  return Judged(engine, call, layer.spec, layer.weights);
}

std::string ToTable(const std::vector<std::pair<std::string, Verdict>>& verdicts) {
  std::string text =
      absl::StrFormat("%-20s %11s %11s %11s %11s\n", "layer", "max abs", "max rel", "max ulp", "of bound");
  for (const auto& [name, verdict] : verdicts) {
    const ErrorReport& report = verdict.local;
    double of_bound = 0;
    for (const StageReport& stage : report.stages) of_bound = std::max(of_bound, stage.max_error_over_bound);
    absl::StrAppendFormat(&text, "%-20s %11.3g %11.3g %11.3g %11.3g  %s\n", name, report.max_abs_error,
                          report.max_rel_error, report.max_ulp_error, of_bound,
                          verdict.within_contract() ? "within the contract" : "OUTSIDE THE CONTRACT");
  }
  return text;
}

}  // namespace layerd
