#include "bench/remote_norm.h"

#include <limits>
#include <utility>

#include "bench/fail.h"

namespace layerd::bench {

RemoteNorm::RemoteNorm(const Arena& arena, const std::string& target, int64_t rows, Sent sent)
    : norm(NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, rows)),
      engine({.target = target, .stream_from_bytes = sent == Sent::kWhole ? std::numeric_limits<int64_t>::max() : 0}) {
  norm->inputs.gamma.reset();
}

NormalizeCall RemoteNorm::Call() const {
  NormalizeCall call;
  call.spec = norm->spec;
  call.inputs = norm->inputs;
  return call;
}

void RemoteNorm::Run() {
  auto result = Normalize(engine, Call());
  if (!result.ok()) Fail(result.status());
  norm->output = result->outputs.output;
}

Work WorkOf(const std::shared_ptr<RemoteNorm>& remote) {
  return NormWork(remote->norm, [remote] { remote->Run(); });
}

Cell RemoteNormCell(std::string variant, std::string baseline, int64_t rows, int threads, double goal) {
  const CellName name{"normalize", std::move(variant), "float32", kNormDim, 0, rows, threads};
  return {.name = name, .bound = Bound::kBaseline, .baseline = std::move(baseline), .goal = goal, .pinned = false};
}

}  // namespace layerd::bench
