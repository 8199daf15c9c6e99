// layerctl: the client of layerd.
#include <grpc/support/log.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/synchronization/mutex.h"
#include "client/commands.h"
#include "client/output.h"

namespace layerd {
namespace {

constexpr char kExamples[] = R"(examples:
  layerctl demo
  layerctl normalize --kind rms_norm --input '[0.5,-1.5,2,1]'
  layerctl normalize --weights model.safetensors --prefix model.norm --input x.npy --out y.npy
  layerctl feedforward --weights model.safetensors --prefix model.layers.0.mlp --activation silu --input x.npy
  layerctl layers list
  layerctl feedforward --layer models/stories260k/layers/model.layers.0.mlp --input x.npy
  layerctl check --seed 1 --dim 512 --hidden 1365
  layerctl plan --dim 4096 --multiple-of 256

exit status: 0 good, 1 outside the contract, 2 usage or file, 3 no connection or no answer in time,
4 refused by the server)";

// The command that was given, at whatever depth.
const CLI::App* Chosen(const CLI::App& app) {
  const CLI::App* chosen = &app;
  while (!chosen->get_subcommands().empty()) chosen = chosen->get_subcommands().front();
  return chosen;
}

int Refuse(const char* text) {
  std::fprintf(stderr, "layerctl: %s\n", text);
  return kExitUsage;
}

int Run(int argc, char** argv) {
  CLI::App app("layerctl asks a layerd to compute transformer layers.", "layerctl");
  app.footer(kExamples);
  app.require_subcommand(1);
  app.set_version_flag("--version", "layerctl " LAYERD_VERSION);
  app.option_defaults()->always_capture_default(false);
  app.fallthrough();  // --server and the like may also stand behind the command

  Session session;
  app.add_option("--server", session.server, "HOST:PORT or unix:PATH (127.0.0.1:50051)")->envname("LAYERD_SERVER");
  app.add_option("--timeout-s", session.timeout_s,
                 "seconds that each call may take, and an upload or a download without progress (60)")
      ->check(CLI::Range(0.001, 1e6))
      ->check([](const std::string& text) {
        return std::string(text.find_first_of("nN") == std::string::npos ? "" : "expected a number, got " + text);
      });
  app.add_flag("--json", session.json, "print JSON");
  app.add_option("--out", session.out,
                 "write the output tensor to FILE.npy or FILE.safetensors[:NAME], a downloaded or quantised layer to "
                 "FILE.safetensors");

  Actions actions;
  for (const auto add :
       {RegisterCompute, RegisterCheck, RegisterLayers, RegisterDemo, RegisterSelfTest, RegisterHealth, RegisterPlan}) {
    add(app, actions);
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto unknown = app.remaining();
    if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !unknown.empty()) {
      std::fprintf(stderr, "layerctl: no command '%s'; see layerctl --help\n", unknown.front().c_str());
      return kExitUsage;
    }
    return Refuse(error.what());
  }
  const Action& action = actions.at(Chosen(app));
  if (session.server.empty()) return Refuse("--server: expected an address, got nothing");
  if (!session.out.empty() && !action.writes_out) return Refuse("--out: not for this command");
  if (session.json && !action.prints_json) return Refuse("--json: not for this command");
  return action.run(session);
}

}  // namespace
}  // namespace layerd

int main(int argc, char** argv) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // as in server/main.cc
  // What gRPC has to say comes back as a status.
  gpr_set_log_function([](gpr_log_func_args*) {});
  int exit_status = layerd::Run(argc, argv);
  std::cout.flush();
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout) {
    std::fprintf(stderr, "layerctl: cannot write to standard output\n");
    exit_status = layerd::kExitUsage;
  }
  // gRPC stays up until the process ends (channel.cc); there is nothing left to save.
  std::fflush(nullptr);
  std::_Exit(exit_status);
}
