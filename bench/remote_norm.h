// A norm that is computed by a daemon.
#ifndef LAYERD_BENCH_REMOTE_NORM_H_
#define LAYERD_BENCH_REMOTE_NORM_H_

#include <cstdint>
#include <memory>
#include <string>

#include "bench/cell.h"
#include "bench/norm_layer.h"
#include "client/remote_engine.h"
#include "lib/base/parallel.h"

namespace layerd::bench {

inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kNormRowBytes = kNormDim * static_cast<int64_t>(sizeof(float));

// How a call goes: in one message whatever its size, or as a stream of its rows.
enum class Sent : uint8_t { kWhole, kStreamed };

// An RMSNorm of so many rows without γ, so that as many bytes go out as come back. Threads: one at a time, but for the
// engine.
struct RemoteNorm {
  RemoteNorm(const Arena& arena, const std::string& target, int64_t rows, Sent sent = Sent::kWhole);

  NormalizeCall Call() const;
  // Calls the daemon and keeps the answer as norm->output. Ends the program where that fails.
  void Run();

  std::shared_ptr<NormUnderTest> norm;
  RemoteEngine engine;
};

// Run() as a cell's work.
Work WorkOf(const std::shared_ptr<RemoteNorm>& remote);

// A cell of such calls, beside `baseline`.
Cell RemoteNormCell(std::string variant, std::string baseline, int64_t rows, int threads, double goal);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_REMOTE_NORM_H_
