// What service_bench calls: a daemon and an echo, each in a process of its own, as callers have them. In one process gRPC
// would have servers and clients share their threads.
#ifndef LAYERD_BENCH_SERVICES_H_
#define LAYERD_BENCH_SERVICES_H_

#include <memory>
#include <string>

#include "bench/child_process.h"
#include "bench/daemon.h"
#include "bench/feed_forward_layer.h"
#include "bench/temporary_folder.h"

namespace layerd::bench {

// Both run from Start() until this is destroyed; see ChildProcess for what becomes of them otherwise. As a static object it
// is destroyed however the program ends by exit(). Threads: any, after Start().
class Services {
 public:
  // The daemon `program` with so many computing threads, and else with its defaults, but that a message may have 64 MiB of
  // tensors. Ends this program with a message where either does not start.
  void Start(const std::string& program, int threads);

  const Daemon& daemon() const { return *daemon_; }
  std::string Target(bool tcp) const { return daemon_->targets()[tcp ? 0 : 1]; }
  const std::string& EchoTarget(bool tcp) const { return tcp ? echo_tcp_ : echo_unix_; }
  const std::string& memory_folder() const { return memory_folder_->path(); }  // the daemon's --shared_memory_dir

  // Uploads the layer, unless it is there, under the name `kLayer`.
  void Upload(const LayerUnderTest& layer) const;
  static constexpr char kLayer[] = "models/bench/layers/mlp";

 private:
  std::unique_ptr<const TemporaryFolder> folder_, memory_folder_;
  std::unique_ptr<ChildProcess> echo_;
  std::unique_ptr<const Daemon> daemon_;
  std::string echo_tcp_, echo_unix_;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_SERVICES_H_
