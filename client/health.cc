// layerctl health.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "client/commands.h"
#include "client/output.h"

namespace layerd {
namespace {

int RunHealth(const Session& session, const std::string& service) {
  RemoteEngine engine(session.EngineOptions());
  if (auto status = engine.CheckHealth(service, absl::Seconds(session.timeout_s)); !status.ok()) {
    return FailRemotely(status);
  }
  std::puts(session.json ? "{\"status\": \"SERVING\"}" : "SERVING");
  return kExitOk;
}

}  // namespace

void RegisterHealth(CLI::App& app, Actions& actions) {
  const auto service = std::make_shared<std::string>();
  auto* command = app.add_subcommand("health", "ask whether the server takes calls");
  command->footer("examples:\n  layerctl health\n  layerctl health --service layerd.v1.LayerService");
  command->add_option("--service", *service, "one service of it, by its full name (the whole server)");
  actions[command] = {.run = [service](const Session& session) { return RunHealth(session, *service); }};
}

}  // namespace layerd
