// layerctl normalize and feedforward.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "client/call_options.h"
#include "client/commands.h"
#include "client/output.h"
#include "client/tensor_source.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

constexpr char kNormalizeExamples[] = R"(examples:
  layerctl normalize --kind rms_norm --input '[0.5,-1.5,2,1]' --eps 0
  layerctl normalize --kind rms_norm --input x.npy --gamma weights.safetensors:model.norm.weight --json
  layerctl normalize --weights model.safetensors --prefix model.norm --input x.npy --verify
  layerctl normalize --layer models/stories260k/layers/model.norm --input x.npy)";

constexpr char kFeedForwardExamples[] = R"(examples:
  layerctl feedforward --weights model.safetensors --prefix model.layers.0.mlp --activation silu --input x.npy
  layerctl feedforward --form plain --activation relu --layout out_in --up '[[1,0],[0,1]]' --down '[[1,1]]' --input '[[1,-2]]'
  layerctl feedforward --seed 1 --dim 512 --hidden 1365 --rows 4 --verify
  layerctl feedforward --layer models/stories260k/layers/model.layers.0.mlp --seed 1 --verify)";

void AddIfThere(NamedTensors& tensors, const char* name, const std::optional<Tensor>& tensor) {
  if (tensor) tensors.emplace_back(name, *tensor);
}

NamedTensors TensorsOf(const NormalizeOutputs& outputs) {
  NamedTensors tensors = {{"output", outputs.output}};
  AddIfThere(tensors, "residual_sum", outputs.residual_sum);
  AddIfThere(tensors, "inverse_rms", outputs.inverse_rms);
  AddIfThere(tensors, "mean", outputs.mean);
  return tensors;
}

NamedTensors TensorsOf(const FeedForwardOutputs& outputs) {
  NamedTensors tensors = {{"output", outputs.output}};
  AddIfThere(tensors, "gate", outputs.gate);
  AddIfThere(tensors, "up", outputs.up);
  AddIfThere(tensors, "hidden", outputs.hidden);
  AddIfThere(tensors, "normed", outputs.normed);
  return tensors;
}

auto Ask(LayerEngine& engine, NormalizeCall call) { return Normalize(engine, std::move(call)); }
auto Ask(LayerEngine& engine, FeedForwardCall call) { return FeedForward(engine, std::move(call)); }

// The width of the resident layer that `options` name, as the server has it.
absl::StatusOr<int64_t> AskWidth(const Session& session, const CommonCallOptions& options) {
  RemoteRegistry registry(session.RegistryOptions());
  const auto listing = registry.Get(options.layer);
  if (!listing.ok()) return listing.status();
  if (!listing->info.status.ok()) return listing->info.status;
  return listing->info.extent.dim;
}

template <typename Result>
int Present(const Session& session, const Result& result) {
  const NamedTensors tensors = TensorsOf(result.outputs);
  if (!session.out.empty()) {
    if (auto status = WriteTensor(session.out, tensors.front().second); !status.ok()) return FailLocally(status);
  }
  if (session.json) {
    std::fputs(ToJson(tensors, result.report, result.layer_hash).c_str(), stdout);
  } else if (session.out.empty()) {
    std::fputs(ToTable(tensors, result.report, result.layer_hash).c_str(), stdout);
  } else if (result.report) {
    std::fputs(ToTable(*result.report).c_str(), stdout);
  }
  return result.report && !result.report->within_contract ? kExitOutsideContract : kExitOk;
}

template <typename Options>
int Compute(const Session& session, Options options) {
  // Before anything is asked, rather than after it was answered.
  if (!session.out.empty()) {
    if (auto status = Under("--out", CheckWritable(session.out)); !status.ok()) return FailLocally(status);
  }
  if (options.common.NeedsWidth()) {
    const auto width = AskWidth(session, options.common);
    if (!width.ok()) return FailRemotely(width.status());
    options.common.dim = *width;
  }
  auto call = options.Build();
  if (!call.ok()) return FailLocally(call.status());
  RemoteEngine engine(session.EngineOptions());
  call->context.deadline = session.Deadline();
  const auto result = Ask(engine, *std::move(call));
  if (!result.ok()) return FailRemotely(result.status());
  return Present(session, *result);
}

template <typename Options>
void Add(CLI::App& app, Actions& actions, const std::string& name, const std::string& description,
         const char* examples) {
  const auto options = std::make_shared<Options>();
  auto* command = app.add_subcommand(name, description)->footer(examples);
  options->Register(*command, LayerPlace::kAnywhere);
  actions[command] = {.run = [options](const Session& session) { return Compute(session, *options); },
                      .writes_out = true};
}

}  // namespace

void RegisterCompute(CLI::App& app, Actions& actions) {
  Add<NormalizeOptions>(app, actions, "normalize", "RMSNorm or LayerNorm of rows", kNormalizeExamples);
  Add<FeedForwardOptions>(app, actions, "feedforward", "a feed-forward layer of rows", kFeedForwardExamples);
}

}  // namespace layerd
