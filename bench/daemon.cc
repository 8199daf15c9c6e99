#include "bench/daemon.h"

#include <signal.h>

#include <cstdint>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "bench/fail.h"

namespace layerd::bench {
namespace {

std::vector<std::string> ArgumentsOf(const std::string& program, const std::vector<std::string>& listen,
                                     const std::vector<std::string>& flags) {
  std::vector<std::string> arguments = {program, absl::StrCat("--grpc_listen=", absl::StrJoin(listen, ","))};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  return arguments;
}

}  // namespace

Daemon::Daemon(const std::string& program, const std::string& folder, const std::vector<std::string>& listen,
               const std::vector<std::string>& flags)
    : process_(ArgumentsOf(program, listen, flags), absl::StrCat(folder, "/layerd.log")) {
  while (targets_.size() < listen.size()) targets_.push_back(process_.ReadAddress());
}

Daemon::~Daemon() { kill(process_.pid(), SIGTERM); }

double Daemon::MemoryMiB(const std::string& name) const {
  std::ifstream status(absl::StrCat("/proc/", process_.pid(), "/status"));
  std::string field;
  for (std::string line; status >> field; std::getline(status, line)) {
    int64_t kib = 0;
    if (field == name + ":" && status >> kib) return static_cast<double>(kib) / 1024;
  }
  Fail(absl::StrCat("no ", name, " of the daemon"));
}

void Daemon::ResetPeak() const {
  std::ofstream file(absl::StrCat("/proc/", process_.pid(), "/clear_refs"));
  if (!(file << 5).flush()) Fail("the peak of the daemon's memory cannot be reset");
}

}  // namespace layerd::bench
