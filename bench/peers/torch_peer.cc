#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/peers/peer.h"

namespace layerd::bench {
namespace {

// A process that answers each line with one line. Ends when its input does.
class Worker {
 public:
  // Throws std::runtime_error where no process can be had.
  Worker(const std::string& script, int threads) {
    int down[2], up[2];
    if (pipe(down) != 0 || pipe(up) != 0) throw std::runtime_error("no pipe");
    const std::string count = absl::StrCat(threads);
    child_ = fork();
    if (child_ < 0) throw std::runtime_error("no process");
    if (child_ == 0) {
      dup2(down[0], STDIN_FILENO);
      dup2(up[1], STDOUT_FILENO);
      for (const int end : {down[0], down[1], up[0], up[1]}) close(end);
      // It uses OpenMP and OpenBLAS by turns, whose threads otherwise spin in each other's way.
      setenv("OMP_WAIT_POLICY", "passive", 0);
      execl("/usr/bin/python3", "python3", script.c_str(), count.c_str(), nullptr);
      _exit(127);
    }
    close(down[0]);
    close(up[1]);
    to_ = fdopen(down[1], "w");
    from_ = fdopen(up[0], "r");
  }
  ~Worker() {
    std::fclose(to_);
    std::fclose(from_);
    waitpid(child_, nullptr, 0);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Throws std::runtime_error where the process is gone.
  std::string Ask(const std::string& line) {
    std::fprintf(to_, "%s\n", line.c_str());
    std::fflush(to_);
    char answer[512];
    if (std::fgets(answer, sizeof(answer), from_) == nullptr) throw std::runtime_error("the worker ended");
    std::string text(answer);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }

 private:
  pid_t child_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

class Torch : public Peer {
 public:
  Torch(const std::string& script, int threads, double sample_seconds)
      : worker_(script, threads), version_(worker_.Ask("version")), sample_seconds_(sample_seconds) {}

  // What the worker said first: its version, or what it misses.
  const std::string& version() const { return version_; }

  std::string Name() const override { return "torch"; }
  std::string Description() const override {
    return absl::StrCat(version_, ", eager, a process of its own (OMP_WAIT_POLICY=passive)");
  }
  bool Has(DType dtype) const override { return dtype == DType::kFloat32 || dtype == DType::kBFloat16; }

  bool UsesAmx(DType dtype) const override { return dtype == DType::kBFloat16 && OneDnnUsesAmx(); }

  PeerWork Prepare(const Arena& arena, LayerUnderTest& layer, int64_t rows) override {
    worker_.Ask(absl::StrFormat("prepare %s %d %d %d %g", std::string(layerd::Name(layer.dtype)), layer.shape.dim,
                                layer.shape.hidden_dim, rows, sample_seconds_));
    return {.sample = [this] { return std::stod(worker_.Ask("sample")); },
            .error = [this] { return std::stod(worker_.Ask("error")); }};
  }

 private:
  Worker worker_;
  const std::string version_;
  const double sample_seconds_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Peer>> TorchPeer(int threads, const std::string& script, double sample_seconds) {
  if (script.empty()) return absl::UnavailableError("no worker was named (--torch_worker)");
  try {
    auto torch = std::make_unique<Torch>(script, threads, sample_seconds);
    if (torch->version().compare(0, 7, "PyTorch") != 0) return absl::UnavailableError(torch->version());
    return torch;
  } catch (const std::runtime_error& error) {
    return absl::UnavailableError(error.what());
  }
}

}  // namespace layerd::bench
