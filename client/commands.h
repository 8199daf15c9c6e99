// The commands of layerctl. Each file of commands adds its own to the command line.
#ifndef LAYERD_CLIENT_COMMANDS_H_
#define LAYERD_CLIENT_COMMANDS_H_

#include <functional>
#include <map>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/remote_engine.h"
#include "client/remote_registry.h"

namespace CLI {
class App;
}

namespace layerd {

// The general options, which may stand before and behind every command.
struct Session {
  std::string server = "127.0.0.1:50051";
  double timeout_s = 60;  // of each call
  bool json = false;
  std::string out;  // file for what the command makes

  RemoteEngineOptions EngineOptions() const { return {server}; }
  RemoteRegistryOptions RegistryOptions() const { return {server, absl::Seconds(timeout_s)}; }
  absl::Time Deadline() const { return absl::Now() + absl::Seconds(timeout_s); }
};

// What a command does, and which general options mean something to it: one that would be ignored is refused.
struct Action {
  std::function<int(const Session&)> run;  // gives the exit status (client/output.h)
  bool prints_json = true;
  bool writes_out = false;
};
using Actions = std::map<const CLI::App*, Action>;

// Each adds commands with their options to `app`, and what they do to `actions`.
void RegisterCompute(CLI::App& app, Actions& actions);   // normalize, feedforward
void RegisterCheck(CLI::App& app, Actions& actions);     // check
void RegisterLayers(CLI::App& app, Actions& actions);    // layers
void RegisterDemo(CLI::App& app, Actions& actions);      // demo
void RegisterSelfTest(CLI::App& app, Actions& actions);  // selftest
void RegisterHealth(CLI::App& app, Actions& actions);    // health
void RegisterPlan(CLI::App& app, Actions& actions);      // plan

}  // namespace layerd

#endif  // LAYERD_CLIENT_COMMANDS_H_
