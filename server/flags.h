// layerd's flags: from a flag file, the environment and the command line, each over the one before.
#ifndef LAYERD_SERVER_FLAGS_H_
#define LAYERD_SERVER_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/kernels/simd.h"
#include "server/resident_layers.h"
#include "server/server.h"

namespace layerd {

struct Config {
  ServerOptions server;
  std::string port_file;
  absl::Duration grace;
  int threads;
  int queue_calls;
  int64_t answer_bytes;
  int batch_rows;
  absl::Duration batch_delay;
  double max_verify_flops;
  std::string shared_memory_dir;  // empty: off
  std::optional<Simd> simd;       // nothing: the widest that the CPU has
  ResidentLayersOptions layers;
};

// Reads the flags. --help and --version end the process with status 0; unknown and unreadable flags with one line and
// status 1, as Abseil has it. Returns
// INVALID_ARGUMENT, naming the flag, for a value out of range or an argument that is no flag.
absl::StatusOr<Config> ParseFlags(int argc, char** argv);

}  // namespace layerd

#endif  // LAYERD_SERVER_FLAGS_H_
