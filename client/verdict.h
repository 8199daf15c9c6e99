// Answers of a server, judged here: its word is not taken for it.
//
// Threads: any; a function that asks waits for the answer.
#ifndef LAYERD_CLIENT_VERDICT_H_
#define LAYERD_CLIENT_VERDICT_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "lib/engine/layer_engine.h"
#include "lib/layers/layer.h"
#include "lib/reference/error_report.h"

namespace layerd {

// The server's report and ours.
struct Verdict {
  std::optional<ErrorReport> server;  // where the call asked for `verify`
  ErrorReport local;
  std::string layer_hash;  // of a call by name

  bool within_contract() const { return local.within_contract && (!server || server->within_contract); }
};

// Asks `call`, which brings its layer. Errors: those of the engine; INTERNAL, reason MALFORMED_ANSWER
// (client/remote_engine.h), for an answer that does not fit the call.
absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, const NormalizeCall& call);
absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, FeedForwardCall call);

// The same for a call that names its layer, which is `layer`.
absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, const NormalizeCall& call, const NormalizeLayer& layer);
absl::StatusOr<Verdict> AskAndJudge(LayerEngine& engine, FeedForwardCall call, const FeedForwardLayer& layer);

// For people: a line for each, under a heading.
std::string ToTable(const std::vector<std::pair<std::string, Verdict>>& verdicts);

}  // namespace layerd

#endif  // LAYERD_CLIENT_VERDICT_H_
