// The commands of layerctl. Each returns the exit status (client/output.h).
#ifndef LAYERD_CLIENT_COMMANDS_H_
#define LAYERD_CLIENT_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "client/call_options.h"
#include "client/remote_engine.h"

namespace layerd {

// What every command that asks a server has.
struct Session {
  std::string server = "127.0.0.1:50051";
  double timeout_s = 60;  // of each call
  bool json = false;
  std::string out;  // file for the output tensor

  RemoteEngineOptions EngineOptions() const { return {server}; }
  absl::Time Deadline() const { return absl::Now() + absl::Seconds(timeout_s); }
};

int RunNormalize(const Session& session, const NormalizeOptions& options);
int RunFeedForward(const Session& session, const FeedForwardOptions& options);

// Asks with `verify` and `intermediates`, and judges the answer again here: the server's word is not taken for it.
int CheckNormalize(const Session& session, const NormalizeOptions& options);
int CheckFeedForward(const Session& session, const FeedForwardOptions& options);

// The same for a norm of each kind and a feed-forward layer of each form in every dtype, made from a seed.
struct SeededCheckOptions {
  uint64_t seed = 1;
  int64_t rows = 4;
  int64_t dim = 512;
  int64_t hidden_dim = 1365;
};
int CheckSeeded(const Session& session, const SeededCheckOptions& options);

// Values known beforehand, computed by the server.
int RunSelfTest(const Session& session);

// What RMSNorm drops from LayerNorm, and how a gate opens and closes, computed by the server.
int RunDemo(const Session& session);

// Asks the health service.
int RunHealth(const Session& session, const std::string& service);

struct PlanOptions {
  int64_t dim = 0;
  int64_t multiple_of = 256;
  std::optional<int64_t> hidden_dim;  // left out: 4·dim for the plain form, GatedHiddenDim() for the gated one
  FeedForwardForm form = FeedForwardForm::kGated;
  bool biases = false;
  DType dtype = DType::kFloat32;
};
// Parameter accounting; asks no server.
int RunPlan(const PlanOptions& options, bool json);

}  // namespace layerd

#endif  // LAYERD_CLIENT_COMMANDS_H_
