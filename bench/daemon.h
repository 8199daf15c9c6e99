// A layerd in a process of its own.
#ifndef LAYERD_BENCH_DAEMON_H_
#define LAYERD_BENCH_DAEMON_H_

#include <string>
#include <vector>

#include "bench/child_process.h"

namespace layerd::bench {

// Runs until this is destroyed; see ChildProcess for what becomes of it otherwise. Threads: any.
class Daemon {
 public:
  // Starts `program`, a layerd, to listen on the addresses `listen` (as --grpc_listen has them), with `flags` beside
  // that, and waits until it does. Its log is kept in `folder`. Ends this program with a message where it does not start.
  Daemon(const std::string& program, const std::string& folder, const std::vector<std::string>& listen,
         const std::vector<std::string>& flags);
  // Ends it by SIGTERM and waits until it has ended.
  ~Daemon();

  // The addresses that it listens on, in the same order, for clients to call.
  const std::vector<std::string>& targets() const { return targets_; }

  // Its memory in MiB, by the system's name for it: "VmRSS", or "VmHWM", the most since the peak was last reset. Both
  // end this program with a message where the system does not tell.
  double MemoryMiB(const std::string& name) const;
  void ResetPeak() const;

 private:
  ChildProcess process_;
  std::vector<std::string> targets_;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_DAEMON_H_
