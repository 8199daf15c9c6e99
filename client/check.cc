// layerctl check: the server's answers, judged here.
#include <algorithm>
#include <cstdio>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/commands.h"
#include "client/output.h"
#include "lib/layers/seeded.h"
#include "lib/reference/judge.h"

namespace layerd {
namespace {

// What one check found: the server's report and ours.
struct Verdict {
  ErrorReport server;
  ErrorReport local;
  bool within_contract() const { return server.within_contract && local.within_contract; }
};

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

absl::StatusOr<Verdict> Ask(LayerEngine& engine, NormalizeCall call) {
  call.verify = true;
  auto result = Normalize(engine, call);
  if (!result.ok()) return result.status();
  if (!result->report) return MalformedAnswer("has no report");
  const Tensor& input = call.inputs.input;
  const DType dtype = call.output_dtype.value_or(input.dtype());
  if (auto status = ExpectShape("output", result->outputs.output, input.shape(), dtype); !status.ok()) return status;
  if (call.inputs.residual) {
    if (auto status = ExpectShape("residual_sum", result->outputs.residual_sum, input.shape(), input.dtype());
        !status.ok()) {
      return status;
    }
  }
  return Verdict{*result->report, JudgeNormalize(call.spec, call.inputs, result->outputs)};
}

absl::StatusOr<Verdict> Ask(LayerEngine& engine, FeedForwardCall call) {
  call.verify = true;
  call.intermediates = true;
  auto result = FeedForward(engine, call);
  if (!result.ok()) return result.status();
  if (!result->report) return MalformedAnswer("has no report");
  const auto extent = CheckFeedForward(call.spec, call.weights, call.input);
  if (!extent.ok()) return extent.status();
  Shape inside = call.input.shape(), outside = call.input.shape();
  inside.back() = extent->hidden_dim;
  outside.back() = extent->out_dim;
  const FeedForwardOutputs& outputs = result->outputs;
  const bool gated = call.spec.form == FeedForwardForm::kGated;
  for (const auto& status :
       {ExpectShape("output", outputs.output, outside, call.output_dtype.value_or(call.input.dtype())),
        gated ? ExpectShape("gate", outputs.gate, inside, DType::kFloat32) : absl::OkStatus(),
        ExpectShape("up", outputs.up, inside, DType::kFloat32),
        ExpectShape("hidden", outputs.hidden, inside, DType::kFloat32),
        call.spec.inner_norm ? ExpectShape("normed", outputs.normed, inside, DType::kFloat32) : absl::OkStatus()}) {
    if (!status.ok()) return status;
  }
  return Verdict{*result->report, JudgeFeedForward(call.spec, call.weights, call.input, outputs)};
}

template <typename Options>
int CheckOne(const Session& session, const Options& options) {
  auto call = options.Build();
  if (!call.ok()) return FailLocally(call.status());
  RemoteEngine engine(session.EngineOptions());
  call->context.deadline = session.Deadline();
  const auto verdict = Ask(engine, *std::move(call));
  if (!verdict.ok()) return FailRemotely(verdict.status());
  if (session.json) {
    std::fputs(ToJson({}, verdict->local).c_str(), stdout);
  } else {
    std::printf("judged here\n%s\nsaid by the server\n%s", ToTable(verdict->local).c_str(),
                ToTable(verdict->server).c_str());
  }
  return verdict->within_contract() ? kExitOk : kExitOutsideContract;
}

// One line of the seeded check.
struct SeededCase {
  std::string name;
  std::optional<NormalizeCall> normalize;
  std::optional<FeedForwardCall> feed_forward;
};

std::vector<SeededCase> SeededCases(const SeededCheckOptions& options) {
  std::vector<SeededCase> cases;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::string suffix = absl::StrCat(" ", std::string(Name(dtype)));
    const Tensor input = SeededInput(options.seed, dtype, {options.rows, options.dim});
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      NormalizeCall call;
      call.spec.kind = kind;
      call.spec.rounding = NormRounding::kBeforeGamma;
      call.inputs.input = input;
      call.inputs.gamma = SeededGamma(options.seed, dtype, options.dim);
      if (kind == NormKind::kLayerNorm) call.inputs.beta = SeededBeta(options.seed, dtype, options.dim);
      cases.push_back({(kind == NormKind::kRmsNorm ? "rms_norm" : "layer_norm") + suffix, std::move(call), {}});
    }
    FeedForwardSpec gelu;
    gelu.form = FeedForwardForm::kPlain;
    gelu.activation = {Activation::kGeluTanh};
    for (const auto& [name, spec, biases] :
         {std::tuple("swiglu", SwiGluSpec(), false), std::tuple("gelu_tanh", gelu, true)}) {
      FeedForwardCall call;
      call.spec = spec;
      call.input = input;
      call.weights = SeededFeedForwardWeights(options.seed, spec, dtype, options.dim, options.hidden_dim, biases);
      cases.push_back({name + suffix, {}, std::move(call)});
    }
  }
  return cases;
}

}  // namespace

int CheckNormalize(const Session& session, const NormalizeOptions& options) { return CheckOne(session, options); }
int CheckFeedForward(const Session& session, const FeedForwardOptions& options) { return CheckOne(session, options); }

int CheckSeeded(const Session& session, const SeededCheckOptions& options) {
  RemoteEngine engine(session.EngineOptions());
  bool all_within = true;
  std::string lines;
  for (SeededCase& one : SeededCases(options)) {
    if (one.normalize) one.normalize->context.deadline = session.Deadline();
    if (one.feed_forward) one.feed_forward->context.deadline = session.Deadline();
    const auto verdict =
        one.normalize ? Ask(engine, *std::move(one.normalize)) : Ask(engine, *std::move(one.feed_forward));
    if (!verdict.ok()) return FailRemotely(verdict.status());
    double of_bound = 0;
    for (const StageReport& stage : verdict->local.stages) of_bound = std::max(of_bound, stage.max_error_over_bound);
    all_within = all_within && verdict->within_contract();
    if (session.json) {
      std::string report = ToJson({}, verdict->local);
      report.pop_back();  // the line's end
      absl::StrAppend(&lines, lines.empty() ? "" : ",\n ", "{\"layer\": \"", one.name, "\", ", report.substr(1));
    } else {
      absl::StrAppendFormat(&lines, "%-20s %11.3g %11.3g %11.3g %11.3g  %s\n", one.name, verdict->local.max_abs_error,
                            verdict->local.max_rel_error, verdict->local.max_ulp_error, of_bound,
                            verdict->within_contract() ? "within the contract" : "OUTSIDE THE CONTRACT");
    }
  }
  if (session.json) {
    std::printf("[%s]\n", lines.c_str());
  } else {
    std::printf("%-20s %11s %11s %11s %11s\n%s", "layer", "max abs", "max rel", "max ulp", "of bound", lines.c_str());
  }
  return all_within ? kExitOk : kExitOutsideContract;
}

}  // namespace layerd
