// layerctl: the client of layerd.
#include <grpc/support/log.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "client/call_options.h"
#include "client/commands.h"
#include "client/output.h"

namespace layerd {
namespace {

constexpr char kExamples[] = R"(examples:
  layerctl demo
  layerctl normalize --kind rms_norm --input '[0.5,-1.5,2,1]'
  layerctl normalize --weights model.safetensors --prefix model.norm --input x.npy --out y.npy
  layerctl feedforward --weights model.safetensors --prefix model.layers.0.mlp --activation silu --input x.npy
  layerctl check --seed 1 --dim 512 --hidden 1365
  layerctl plan --dim 4096 --multiple-of 256

exit status: 0 good, 1 outside the contract, 2 usage or file, 3 no connection or no answer in time,
4 refused by the server)";

constexpr char kNormalizeExamples[] = R"(examples:
  layerctl normalize --kind rms_norm --input '[0.5,-1.5,2,1]' --eps 0
  layerctl normalize --kind rms_norm --input x.npy --gamma weights.safetensors:model.norm.weight --json
  layerctl normalize --weights model.safetensors --prefix model.norm --input x.npy --verify)";

constexpr char kFeedForwardExamples[] = R"(examples:
  layerctl feedforward --weights model.safetensors --prefix model.layers.0.mlp --activation silu --input x.npy
  layerctl feedforward --form plain --activation relu --layout out_in --up '[[1,0],[0,1]]' --down '[[1,1]]' --input '[[1,-2]]'
  layerctl feedforward --seed 1 --dim 512 --hidden 1365 --rows 4 --verify)";

constexpr char kCheckNormalizeExamples[] = R"(examples:
  layerctl check normalize --kind layer_norm --input '[0.5,-1.5,2,1]'
  layerctl check normalize --seed 1 --dim 4096 --kind rms_norm --dtype bfloat16 --rounding before_gamma)";

constexpr char kCheckFeedForwardExamples[] = R"(examples:
  layerctl check feedforward --seed 1 --dim 512 --hidden 1365
  layerctl check feedforward --weights model.safetensors --prefix model.layers.0.mlp --activation silu --input x.npy)";

int Run(int argc, char** argv) {
  CLI::App app("layerctl asks a layerd to compute transformer layers.", "layerctl");
  app.footer(kExamples);
  app.require_subcommand(1);
  app.set_version_flag("--version", "layerctl " LAYERD_VERSION);
  app.option_defaults()->always_capture_default(false);
  app.fallthrough();  // --server and the like may also stand behind the command

  Session session;
  app.add_option("--server", session.server, "HOST:PORT or unix:PATH (127.0.0.1:50051)")->envname("LAYERD_SERVER");
  app.add_option("--timeout-s", session.timeout_s, "seconds that each call may take (60)")
      ->check(CLI::Range(0.001, 1e6))
      ->check([](const std::string& text) {
        return std::string(text.find_first_of("nN") == std::string::npos ? "" : "expected a number, got " + text);
      });
  app.add_flag("--json", session.json, "print JSON");
  app.add_option("--out", session.out, "write the output tensor to FILE.npy or FILE.safetensors[:NAME]");

  NormalizeOptions normalize, check_normalize;
  FeedForwardOptions feed_forward, check_feed_forward;
  SeededCheckOptions seeded;
  PlanOptions plan;
  std::string health_service;

  auto* normalize_command = app.add_subcommand("normalize", "RMSNorm or LayerNorm of rows")->footer(kNormalizeExamples);
  normalize.Register(*normalize_command);
  auto* feed_forward_command =
      app.add_subcommand("feedforward", "a feed-forward layer of rows")->footer(kFeedForwardExamples);
  feed_forward.Register(*feed_forward_command);

  auto* check_command = app.add_subcommand(
      "check", "ask with verify, and judge the answer here too; without a layer, a set of seeded ones");
  check_command->add_option("--seed", seeded.seed, "of the seeded layers (1)")->check(CLI::NonNegativeNumber);
  check_command->add_option("--rows", seeded.rows, "of their input (4)")->check(CLI::Range(0, 1 << 20));
  check_command->add_option("--dim", seeded.dim, "their width (512)")->check(CLI::Range(1, 1 << 20));
  check_command->add_option("--hidden", seeded.hidden_dim, "their hidden width (1365)")->check(CLI::Range(1, 1 << 20));
  check_command->require_subcommand(0, 1);
  auto* check_normalize_command = check_command->add_subcommand("normalize", "one norm, described as for normalize");
  check_normalize_command->footer(kCheckNormalizeExamples);
  check_normalize.Register(*check_normalize_command);
  auto* check_feed_forward_command =
      check_command->add_subcommand("feedforward", "one layer, described as for feedforward");
  check_feed_forward_command->footer(kCheckFeedForwardExamples);
  check_feed_forward.Register(*check_feed_forward_command);

  auto* demo_command = app.add_subcommand("demo", "what norms and gates do, with figures from the server");
  auto* self_test_command = app.add_subcommand("selftest", "values known beforehand, computed by the server");
  self_test_command->footer("examples:\n  layerctl selftest");
  auto* health_command = app.add_subcommand("health", "ask whether the server takes calls");
  health_command->footer("examples:\n  layerctl health\n  layerctl health --service layerd.v1.LayerService");
  health_command->add_option("--service", health_service, "one service of it, by its full name (the whole server)");

  auto* plan_command =
      app.add_subcommand("plan", "parameters, FLOPs and bytes of a feed-forward layer; no server needed");
  plan_command->add_option("--dim", plan.dim, "width")->required();
  auto* plan_hidden = plan_command->add_option("--hidden", plan.hidden_dim,
                                               "hidden width (plain: 4 dim; gated: 2/3 of it, rounded up)");
  auto* multiple_of =
      plan_command->add_option("--multiple-of", plan.multiple_of, "what the gated width is rounded up to (256)");
  multiple_of->excludes(plan_hidden);
  plan_command->add_flag_callback(
      "--plain", [&] { plan.form = FeedForwardForm::kPlain; }, "two matrices, no gate");
  plan_command->add_flag("--biases", plan.biases, "with biases");
  plan_command->add_flag_callback(
      "--16bit", [&] { plan.dtype = DType::kBFloat16; }, "2 bytes a value instead of 4");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto unknown = app.remaining();
    if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !unknown.empty()) {
      std::fprintf(stderr, "layerctl: no command '%s'; see layerctl --help\n", unknown.front().c_str());
    } else {
      std::fprintf(stderr, "layerctl: %s\n", error.what());
    }
    return kExitUsage;
  }
  // An option that would be ignored is refused.
  const bool computes = *normalize_command || *feed_forward_command;
  const bool prints_json = computes || *check_command || *health_command || *plan_command || *self_test_command;
  const bool one_layer = *check_normalize_command || *check_feed_forward_command;
  const bool seeded_given = check_command->count("--seed") + check_command->count("--rows") +
                                check_command->count("--dim") + check_command->count("--hidden") >
                            0;
  const char* ignored = nullptr;
  if (session.server.empty()) ignored = "--server: expected an address, got nothing";
  if (!session.out.empty() && !computes) ignored = "--out: for normalize and feedforward only";
  if (session.json && !prints_json) ignored = "--json: not for this command";
  if (one_layer && seeded_given) ignored = "check's own options are for its seeded layers; put them behind the layer";
  if (ignored != nullptr) {
    std::fprintf(stderr, "layerctl: %s\n", ignored);
    return kExitUsage;
  }
  if (*normalize_command) return RunNormalize(session, normalize);
  if (*feed_forward_command) return RunFeedForward(session, feed_forward);
  if (*check_normalize_command) return CheckNormalize(session, check_normalize);
  if (*check_feed_forward_command) return CheckFeedForward(session, check_feed_forward);
  if (*check_command) return CheckSeeded(session, seeded);
  if (*demo_command) return RunDemo(session);
  if (*self_test_command) return RunSelfTest(session);
  if (*health_command) return RunHealth(session, health_service);
  return RunPlan(plan, session.json);
}

}  // namespace
}  // namespace layerd

int main(int argc, char** argv) {
  // What gRPC has to say comes back as a status.
  gpr_set_log_function([](gpr_log_func_args*) {});
  int exit_status = layerd::Run(argc, argv);
  std::cout.flush();
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout) {
    std::fprintf(stderr, "layerctl: cannot write to standard output\n");
    exit_status = layerd::kExitUsage;
  }
  // gRPC stays up until the process ends (remote_engine.cc); there is nothing left to save.
  std::fflush(nullptr);
  std::_Exit(exit_status);
}
