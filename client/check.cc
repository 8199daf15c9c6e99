// layerctl check: the server's answers, judged here.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/call_options.h"
#include "client/commands.h"
#include "client/output.h"
#include "client/seed_option.h"
#include "client/verdict.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

// What the check without a layer makes.
struct SeededCheckOptions {
  uint64_t seed = 1;
  int64_t rows = 4;
  int64_t dim = 512;
  int64_t hidden_dim = 1365;
};

constexpr char kNormalizeExamples[] = R"(examples:
  layerctl check normalize --kind layer_norm --input '[0.5,-1.5,2,1]'
  layerctl check normalize --seed 1 --dim 4096 --kind rms_norm --dtype bfloat16 --rounding before_gamma)";

constexpr char kFeedForwardExamples[] = R"(examples:
  layerctl check feedforward --seed 1 --dim 512 --hidden 1365
  layerctl check feedforward --weights model.safetensors --prefix model.layers.0.mlp --activation silu --input x.npy)";

template <typename Options>
int CheckOne(const Session& session, const Options& options) {
  auto call = options.Build();
  if (!call.ok()) return FailLocally(call.status());
  RemoteEngine engine(session.EngineOptions());
  call->verify = true;
  call->context.deadline = session.Deadline();
  const auto verdict = AskAndJudge(engine, *std::move(call));
  if (!verdict.ok()) return FailRemotely(verdict.status());
  if (session.json) {
    std::fputs(ToJson({}, verdict->local).c_str(), stdout);
  } else {
    std::printf("judged here\n%s\nsaid by the server\n%s", ToTable(verdict->local).c_str(),
                ToTable(*verdict->server).c_str());
  }
  return verdict->within_contract() ? kExitOk : kExitOutsideContract;
}

// One line of the seeded check.
struct SeededCase {
  std::string name;
  std::variant<NormalizeCall, FeedForwardCall> call;
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
      cases.push_back({(kind == NormKind::kRmsNorm ? "rms_norm" : "layer_norm") + suffix, std::move(call)});
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
      cases.push_back({name + suffix, std::move(call)});
    }
  }
  return cases;
}

int CheckSeeded(const Session& session, const SeededCheckOptions& options) {
  RemoteEngine engine(session.EngineOptions());
  std::vector<std::pair<std::string, Verdict>> verdicts;
  for (SeededCase& one : SeededCases(options)) {
    const auto ask = [&](auto& call) {
      call.verify = true;
      call.context.deadline = session.Deadline();
      return AskAndJudge(engine, std::move(call));
    };
    auto verdict = std::visit(ask, one.call);
    if (!verdict.ok()) return FailRemotely(verdict.status());
    verdicts.emplace_back(one.name, *std::move(verdict));
  }
  bool all_within = true;
  std::string json;
  for (const auto& [name, verdict] : verdicts) {
    all_within = all_within && verdict.within_contract();
    std::string report = ToJson({}, verdict.local);
    report.pop_back();  // the line's end
    absl::StrAppend(&json, json.empty() ? "" : ",\n ", "{\"layer\": \"", name, "\", ", report.substr(1));
  }
  std::fputs((session.json ? absl::StrCat("[", json, "]\n") : ToTable(verdicts)).c_str(), stdout);
  return all_within ? kExitOk : kExitOutsideContract;
}

// Adds one layer's check, described by Options.
template <typename Options>
void AddOne(CLI::App& check, Actions& actions, const std::string& name, const std::string& description,
            const char* examples) {
  const auto options = std::make_shared<Options>();
  auto* command = check.add_subcommand(name, description)->footer(examples);
  options->Register(*command, LayerPlace::kWithCall);
  actions[command] = {.run = [options, &check](const Session& session) {
    if (check.count("--seed") + check.count("--rows") + check.count("--dim") + check.count("--hidden") > 0) {
      return FailLocally(
          absl::InvalidArgumentError("check's own options are for its seeded layers; put them behind the layer"));
    }
    return CheckOne(session, *options);
  }};
}

}  // namespace

void RegisterCheck(CLI::App& app, Actions& actions) {
  const auto seeded = std::make_shared<SeededCheckOptions>();
  auto* command = app.add_subcommand(
      "check", "ask with verify, and judge the answer here too; without a layer, a set of seeded ones");
  command->add_option("--seed", seeded->seed, "of the seeded layers (1)")->check(SeedOf<uint64_t>());
  command->add_option("--rows", seeded->rows, "of their input (4)")->check(CLI::Range(0, 1 << 20));
  command->add_option("--dim", seeded->dim, "their width (512)")->check(CLI::Range(1, 1 << 20));
  command->add_option("--hidden", seeded->hidden_dim, "their hidden width (1365)")->check(CLI::Range(1, 1 << 20));
  command->require_subcommand(0, 1);
  actions[command] = {.run = [seeded](const Session& session) { return CheckSeeded(session, *seeded); }};
  AddOne<NormalizeOptions>(*command, actions, "normalize",
                           "one norm that comes with the call, described as for normalize", kNormalizeExamples);
  AddOne<FeedForwardOptions>(*command, actions, "feedforward",
                             "one layer that comes with the call, described as for feedforward", kFeedForwardExamples);
}

}  // namespace layerd
