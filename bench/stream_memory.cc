// Streams rows through a daemon of its own, and tells how much memory the daemon takes for it and how fast they go: as
// many bytes out as back, every answer compared with what the layer gives in this process. docs/performance.md.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/norm_layer.h"
#include "client/remote_engine.h"
#include "client/row_stream.h"
#include "lib/base/parallel.h"

extern char** environ;

namespace layerd::bench {
namespace {

constexpr double kMiB = 1 << 20;
// Chunks that differ, so that an answer out of its turn is seen.
constexpr int kChunks = 5;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "stream_memory: %s\n", what.c_str());
  std::exit(1);
}

// A layerd on a free port of loopback, ended by SIGTERM.
class Daemon {
 public:
  explicit Daemon(const std::string& program) {
    std::string folder = (std::filesystem::temp_directory_path() / "layerd_stream_XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) Fail("no temporary folder can be made");
    folder_ = folder;
    const std::string port_file = absl::StrCat(folder, "/port");
    std::string arguments[] = {program, "--grpc_listen=127.0.0.1:0", absl::StrCat("--port_file=", port_file)};
    char* argv[] = {arguments[0].data(), arguments[1].data(), arguments[2].data(), nullptr};
    const std::string log = absl::StrCat(folder, "/log");
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
    const int error = posix_spawn(&pid_, program.c_str(), &files, nullptr, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) Fail("cannot start " + program);
    while (!std::filesystem::exists(port_file)) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) Fail(program + " has ended");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::string kind;
    int port = 0;
    if (!(std::ifstream(port_file) >> kind >> port)) Fail("no port in the port file");
    target_ = absl::StrCat("127.0.0.1:", port);
  }
  ~Daemon() {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
    std::filesystem::remove_all(folder_);
  }

  const std::string& target() const { return target_; }
  // "VmRSS" or "VmHWM", the most so far, in MiB.
  double Memory(const std::string& field) const {
    std::ifstream status(absl::StrCat("/proc/", pid_, "/status"));
    std::string name;
    for (std::string line; status >> name; std::getline(status, line)) {
      int64_t kib = 0;
      if (name == field + ":" && status >> kib) return static_cast<double>(kib) / 1024;
    }
    Fail("no " + field + " of the daemon");
  }

 private:
  std::filesystem::path folder_;
  pid_t pid_ = 0;
  std::string target_;
};

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
  if (!status.ok()) Fail(status.ToString());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int Main(const std::string& program, double gib, double chunk_mib, double goal_mib) {
  const Arena arena(AvailableCpus());
  const auto chunk_rows = static_cast<int64_t>(chunk_mib * kMiB / (kNormDim * sizeof(float)));
  const auto norm = NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, kChunks * chunk_rows);
  NormLayerOf(arena, norm)();  // what every answer must be

  const Daemon daemon(program);
  RemoteEngine engine({.target = daemon.target()});
  if (auto status = engine.CheckHealth("layerd.v1.LayerService", absl::Seconds(10)); !status.ok()) {
    Fail(status.ToString());
  }
  const double idle = daemon.Memory("VmRSS");
  const auto count = static_cast<int64_t>(gib * 1024 / chunk_mib);
  const double seconds = Stream(engine, *norm, count);
  const double grown = daemon.Memory("VmHWM") - idle;
  std::printf("%.2f GiB of rows out and as many back in %.1f s, %.2f GB/s each way; all bits as in process\n", gib,
              seconds, gib * 1024 * kMiB / seconds / 1e9);
  std::printf("daemon: %.1f MiB idle, at most %.1f MiB more; goal %.0f MiB\n", idle, grown, goal_mib);
  return grown <= goal_mib ? 0 : 1;
}

}  // namespace
}  // namespace layerd::bench

int main(int argc, char** argv) {
  std::string program = (std::filesystem::path(argv[0]).parent_path() / "layerd").string();
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
