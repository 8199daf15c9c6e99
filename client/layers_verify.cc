// layerctl layers verify: a resident layer, judged here.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/layer_text.h"
#include "client/layers.h"
#include "client/output.h"
#include "client/progress.h"
#include "client/seed_option.h"
#include "client/verdict.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

struct Options {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 4;
  bool progress = false;
};

using Verdicts = std::vector<std::pair<std::string, Verdict>>;

// Asks with `verify`; without it where that is too much for the server, which leaves our own judgement.
template <typename Call, typename One>
absl::StatusOr<Verdict> Ask(const Session& session, LayerEngine& engine, Call call, const One& layer) {
  call.verify = true;
  call.context.deadline = session.Deadline();
  auto verdict = AskAndJudge(engine, call, layer);
  if (verdict.ok() || DetailsOf(verdict.status()).reason != "VERIFY_TOO_LARGE") return verdict;
  call.verify = false;
  call.context.deadline = session.Deadline();
  return AskAndJudge(engine, std::move(call), layer);
}

absl::StatusOr<Verdicts> AskAll(const Session& session, const Options& options, const Layer& downloaded) {
  RemoteEngine engine(session.EngineOptions());
  Verdicts verdicts;
  const auto extent = CheckLayer(downloaded);
  if (!extent.ok()) return extent.status();
  const Shape shape = {options.rows, extent->dim};
  const auto add = [&](DType dtype, absl::StatusOr<Verdict> verdict) {
    if (!verdict.ok()) return verdict.status();
    verdicts.emplace_back(std::string(Name(dtype)), *std::move(verdict));
    return absl::OkStatus();
  };
  if (const auto* layer = std::get_if<FeedForwardLayer>(&downloaded)) {
    FeedForwardCall call;
    call.layer = options.name;
    call.input = SeededInput(options.seed, DType::kFloat32, shape);
    if (auto status = add(DType::kFloat32, Ask(session, engine, std::move(call), *layer)); !status.ok()) return status;
    return verdicts;
  }
  const auto& layer = std::get<NormalizeLayer>(downloaded);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    NormalizeCall call;
    call.layer = options.name;
    call.inputs.input = SeededInput(options.seed, dtype, shape);
    if (layer.spec.gate_position != GatePosition::kNone) {
      call.inputs.gate = SeededTensor(options.seed, "norm_gate", dtype, shape, std::sqrt(3.0));
    }
    if (auto status = add(dtype, Ask(session, engine, std::move(call), layer)); !status.ok()) return status;
  }
  return verdicts;
}

// Whether all say the same hash as the downloaded bytes have; tells on standard error who does not.
bool HashesAgree(const std::string& hash, const std::string& described, const Verdicts& verdicts) {
  bool agree = true;
  const auto compare = [&](std::string_view who, const std::string& said) {
    if (said == hash) return;
    agree = false;
    std::fprintf(stderr, "layerctl: content hash: the bytes have %s, %s says %s\n", hash.c_str(),
                 std::string(who).c_str(), said.empty() ? "nothing" : Shortened(said).c_str());
  };
  compare("describe", described);
  for (const auto& [input, verdict] : verdicts) compare(absl::StrCat("the answer for ", input), verdict.layer_hash);
  return agree;
}

int Verify(const Session& session, const Options& options) {
  RemoteRegistry registry(session.RegistryOptions());
  absl::StatusOr<DownloadedLayer> downloaded;
  {
    ProgressBar bar(options.name, options.progress);
    downloaded = registry.Download(options.name, [&bar](int64_t done, int64_t total) { bar.Update(done, total); });
  }
  if (!downloaded.ok()) return FailRemotely(downloaded.status());
  const auto verdicts = AskAll(session, options, downloaded->layer);
  if (!verdicts.ok()) return FailRemotely(verdicts.status());
  // Now that it was used, the server knows the hash of a checkpoint's layer too.
  const auto listing = registry.Get(options.name);
  if (!listing.ok()) return FailRemotely(listing.status());

  bool good = HashesAgree(downloaded->content_hash, listing->info.content_hash, *verdicts);
  bool self_verified = true;
  OrderedJson cases = OrderedJson::array();
  for (const auto& [input, verdict] : *verdicts) {
    good = good && verdict.within_contract();
    self_verified = self_verified && verdict.server.has_value();
    OrderedJson one = {{"input", input}, {"layer_hash", verdict.layer_hash}};
    one.update(OrderedJson::parse(ToJson({}, verdict.local)));
    cases.push_back(std::move(one));
  }
  if (session.json) {
    std::fputs(JsonLine({{"name", options.name},
                         {"content_hash", downloaded->content_hash},
                         {"verified_by_server", self_verified},
                         {"cases", cases},
                         {"good", good}})
                   .c_str(),
               stdout);
  } else {
    std::printf("%s  %s\n%s", options.name.c_str(), downloaded->content_hash.c_str(), ToTable(*verdicts).c_str());
    if (!self_verified) std::puts("judged here only: too large for the server to verify (--max_verify_flops)");
  }
  return good ? kExitOk : kExitOutsideContract;
}

}  // namespace

void RegisterLayersVerify(CLI::App& layers, Actions& actions) {
  const auto options = std::make_shared<Options>();
  auto* command = layers.add_subcommand(
      "verify",
      "download a layer, compute its hash, ask the server for random rows by name, and judge the answers here");
  command->footer("examples:\n  layerctl layers verify models/stories260k/layers/model.layers.0.mlp");
  command->add_option("NAME", options->name, "models/MODEL/layers/LAYER")->required();
  command->add_option("--seed", options->seed, "of the rows (1)")->check(SeedOf<uint64_t>());
  command->add_option("--rows", options->rows, "how many (4)")->check(CLI::Range(1, 1 << 20));
  command->add_flag("--progress", options->progress, "show progress, even where no terminal is");
  actions[command] = {.run = [options](const Session& session) { return Verify(session, *options); }};
}

}  // namespace layerd
