// Streams rows through a daemon of its own, and tells how much memory the daemon takes for it and how fast they go: as
// many bytes out as back, every answer compared with what the layer gives in this process. docs/performance.md.
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/child_process.h"
#include "bench/daemon.h"
#include "bench/fail.h"
#include "bench/norm_layer.h"
#include "bench/temporary_folder.h"
#include "client/remote_engine.h"
#include "client/row_stream.h"
#include "lib/base/parallel.h"

namespace layerd::bench {
namespace {

constexpr double kMiB = 1 << 20;
// Chunks that differ, so that an answer out of its turn is seen.
constexpr int kChunks = 5;

// Sends `count` chunks and compares each answer with what is expected of its chunk; answers the seconds that it took.
double Stream(RemoteEngine& engine, const NormUnderTest& norm, int64_t count) {
  const int64_t chunk_rows = norm.inputs.input.dim(0) / kChunks;
  const auto chunk_of = [&](const Tensor& rows, int64_t i) { return rows.Rows(i % kChunks * chunk_rows, chunk_rows); };
  NormalizeCall call;
  call.spec = norm.spec;
  call.inputs = norm.inputs;
  call.inputs.input = norm.inputs.input.Rows(0, 0);
  const auto begin = std::chrono::steady_clock::now();
  const auto stream = engine.StreamNormalize(call);
  std::thread writer([&] {
    for (int64_t i = 0; i < count; ++i) {
      if (!stream->Write({.input = chunk_of(norm.inputs.input, i)})) return;
    }
    stream->WritesDone();
  });
  absl::Status status;
  int64_t got = -1;  // the call itself is the first to be answered
  for (; status.ok(); ++got) {
    const auto answer = stream->Read();
    status = answer.status();
    if (!answer.ok() || !answer->has_value()) break;
    if (got >= 0 && !SameBits((*answer)->outputs.output, chunk_of(norm.output, got))) {
      status = absl::DataLossError(absl::StrCat("the bits of chunk ", got, " are not those of the layer"));
      stream->Cancel();
    }
  }
  writer.join();
  if (status.ok() && got != count) status = absl::DataLossError(absl::StrCat(got, " answers to ", count, " chunks"));
  if (!status.ok()) Fail(status);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int Main(const std::string& program, double gib, double chunk_mib, double goal_mib) {
  const Arena arena(AvailableCpus());
  const auto chunk_rows = static_cast<int64_t>(chunk_mib * kMiB / (kNormDim * sizeof(float)));
  const auto norm = NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, kChunks * chunk_rows);
  NormLayerOf(arena, norm)();  // what every answer must be

  // Static, so that exit() ends it too.
  static const TemporaryFolder folder;
  static const Daemon daemon(program, folder.path(), {"127.0.0.1:0"}, {});
  RemoteEngine engine({.target = daemon.targets()[0]});
  if (auto status = engine.CheckHealth("layerd.v1.LayerService", absl::Seconds(10)); !status.ok()) {
    Fail(status);
  }
  const double idle = daemon.MemoryMiB("VmRSS");
  const auto count = static_cast<int64_t>(gib * 1024 / chunk_mib);
  const double seconds = Stream(engine, *norm, count);
  const double grown = daemon.MemoryMiB("VmHWM") - idle;
  std::printf("%.2f GiB of rows out and as many back in %.1f s, %.2f GB/s each way; all bits as in process\n", gib,
              seconds, gib * 1024 * kMiB / seconds / 1e9);
  std::printf("daemon: %.1f MiB idle, at most %.1f MiB more; goal %.0f MiB\n", idle, grown, goal_mib);
  return grown <= goal_mib ? 0 : 1;
}

}  // namespace
}  // namespace layerd::bench

int main(int argc, char** argv) {
  std::string program = layerd::bench::ProgramBeside("layerd");
  double gib = 4, chunk_mib = 4, goal_mib = 256;
  CLI::App app(
      "Streams rows through a daemon of its own: its memory, the rate, and every bit. Exit status 1 over the goal.");
  app.add_option("--daemon", program, "The layerd to start")->check(CLI::ExistingFile)->capture_default_str();
  app.add_option("--gib", gib, "GiB of rows, each way")->check(CLI::Range(0.01, 1024.0))->capture_default_str();
  app.add_option("--chunk_mib", chunk_mib, "MiB of a message")->check(CLI::Range(0.0625, 4.0))->capture_default_str();
  app.add_option("--goal_mib", goal_mib, "Most memory over the idle daemon's")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return layerd::bench::Main(program, gib, chunk_mib, goal_mib);
}
