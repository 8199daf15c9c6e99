// Runs layerd's packed layers beside those of other libraries, in one run: a ratio is our time over theirs.
// docs/performance.md tells how to run and read it.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "bench/cell.h"
#include "bench/norm_layer.h"
#include "bench/peers/peer.h"
#include "bench/run_cells.h"
#include "lib/base/parallel.h"
#include "lib/kernels/convert.h"
#include "lib/kernels/matmul.h"

namespace layerd::bench {
namespace {

struct Options {
  RunOptions run;
  int threads = AvailableCpus();
  std::string onnxruntime;
  std::string models;
  std::string torch_worker;
};

struct Size {
  FeedForwardShape shape;
  std::vector<int64_t> rows;
};
const std::array<Size, 3> kSizes = {
    {{{4096, 11008}, {1, 4, 16, 64, 256, 1024}}, {{2048, 5632}, {1, 4, 64, 1024}}, {{512, 1365}, {1, 4, 64, 1024}}}};

}  // namespace

bool OneDnnUsesAmx() {
  std::ifstream file("/proc/cpuinfo");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return text.find("amx_bf16") != std::string::npos && std::getenv("DNNL_MAX_CPU_ISA") == nullptr;
}

namespace {

// Ours takes its input in the weights' dtype, as the peers do, and answers in float32.
Work Prepare(const Arena& arena, Peer& peer, FeedForwardShape shape, DType dtype, int64_t rows) {
  const std::shared_ptr<LayerUnderTest> layer = LayerOf(arena, shape, dtype);
  const PackedFeedForward& packed = PackedOf(arena, *layer);
  Tensor input = RowsOf(layer->input, 0, rows);
  if (dtype != DType::kFloat32 && IsFloat(dtype)) {
    Tensor narrow = Tensor::Allocate(dtype, input.shape());
    NarrowFromFloat(dtype, input.floats(), narrow.mutable_data(), input.num_elements());
    input = narrow;
  }
  const auto output = std::make_shared<Tensor>();
  const auto theirs = std::make_shared<PeerWork>(peer.Prepare(arena, *layer, rows));
  Work work;
  work.run = [&arena, &packed, layer, input, output] {
    *output = FeedForward(arena, packed, input, DType::kFloat32, false)->output;
  };
  work.error = [&arena, layer, output] { return FeedForwardError(arena, *layer, *output); };
  work.flops = FeedForwardFlops(layer->spec, {rows, shape.dim, shape.hidden_dim, shape.dim});
  work.bytes = WeightBytes(*layer) + static_cast<double>(input.num_bytes());
  work.baseline = theirs->run;
  work.baseline_sample = theirs->sample;
  work.baseline_error = theirs->error ? theirs->error : [&arena, layer, theirs] {
    return FeedForwardError(arena, *layer, *theirs->output);
  };
  return work;
}

// At least as fast as the fastest of them at the smaller shapes.
std::optional<double> GoalOf(const CellName& name, bool amx) {
  if (amx || name.dim == 4096 || (name.dtype == "int8" && name.dim == 512 && name.rows == 1)) return std::nullopt;
  return 1.0;
}

void AddFeedForward(const std::vector<std::unique_ptr<Peer>>& peers, int threads, std::vector<Cell>& cells) {
  for (const Size& size : kSizes) {
    for (const DType dtype : kWeightDTypes) {
      for (const auto& peer : peers) {
        if (!peer->Has(dtype)) continue;
        const bool amx = peer->UsesAmx(dtype);
        const std::string variant = absl::StrCat("over_", peer->Name(), amx ? "_amx" : "");
        for (const int64_t rows : size.rows) {
          const CellName name{"feed_forward", variant, std::string(Name(dtype)), size.shape.dim, size.shape.hidden_dim,
                              rows,           threads};
          cells.push_back({.name = name,
                           .bound = Bound::kBaseline,
                           .baseline = peer->Name(),
                           .goal = GoalOf(name, amx),
                           .prepare = [&peer = *peer, shape = size.shape, dtype, rows](const Arena& arena) {
                             return Prepare(arena, peer, shape, dtype, rows);
                           }});
        }
      }
    }
  }
}

void AddNorms(int max_threads, std::vector<Cell>& cells) {
  for (const int64_t rows : kNormRows) {
    for (const int threads : {1, max_threads}) {
      if (threads == 1 && max_threads == 1 && !cells.empty() && cells.back().name.rows == rows) continue;
      const CellName name{"rms_norm", "over_plain_c", "float32", kNormDim, 0, rows, threads};
      Cell cell{.name = name, .bound = Bound::kBaseline, .baseline = "plain_c"};
      if (rows == 64) cell.goal = 1 / 0.9;
      cell.prepare = [=](const Arena& arena) {
        const auto norm = NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, rows);
        Work work = NormWork(norm, NormKernelOf(arena, norm));
        const auto theirs = NormOf(arena, NormKind::kRmsNorm, DType::kFloat32, rows);
        NormKernelOf(arena, theirs);  // gives it an output
        work.baseline = [theirs, rows, threads] {
          PlainRmsNorm(theirs->inputs.input.floats(), theirs->inputs.gamma->floats(), theirs->output.mutable_floats(),
                       rows, kNormDim, static_cast<float>(EpsilonOf(theirs->spec)), threads);
        };
        work.baseline_error = [theirs] { return NormError(*theirs); };
        return work;
      };
      cells.push_back(cell);
    }
  }
}

int Main(Options& options) {
  // Our packed layers do without OpenBLAS, and so the peer has the library for itself.
  if (const auto matmul = InitMatMul(false); !matmul.ok()) return 1;
  Description machine = DescribeMachine();
  std::vector<std::unique_ptr<Peer>> peers;
  const auto add = [&](const char* name, absl::StatusOr<std::unique_ptr<Peer>> peer) {
    machine.emplace_back(
        name, peer.ok() ? (*peer)->Description() : absl::StrCat("skipped: ", std::string(peer.status().message())));
    if (peer.ok()) peers.push_back(*std::move(peer));
  };
  add("peer openblas", OpenBlasPeer(options.threads));
  add("peer onednn", OneDnnPeer(options.threads));
  add("peer onnxruntime", OnnxRuntimePeer(options.threads, options.onnxruntime, options.models));
  add("peer torch", TorchPeer(options.threads, options.torch_worker, options.run.pairs.sample_seconds));
  machine.emplace_back("peer plain_c", absl::StrCat("gcc, ", LAYERD_PEERS_PLAIN_FLAGS));
  for (const char* variable : {"OMP_WAIT_POLICY", "OPENBLAS_CORETYPE", "DNNL_MAX_CPU_ISA"}) {
    const char* value = std::getenv(variable);
    machine.emplace_back(variable, value == nullptr ? "not set" : value);
  }

  std::vector<Cell> cells;
  AddNorms(options.threads, cells);
  AddFeedForward(peers, options.threads, cells);
  return RunCells(options.run, Chosen(options.run, std::move(cells)), std::move(machine));
}

}  // namespace
}  // namespace layerd::bench

int main(int argc, char** argv) {
  layerd::bench::Options options;
  // The threads of OpenMP, OpenBLAS and ONNX Runtime wait for more work by spinning, some for more than 30 ms. They keep
  // that, since it serves them well, and have given up when our turn comes.
  options.run.pairs.pause_seconds = 0.1;
  CLI::App app("Runs layerd's layers beside those of other libraries.");
  layerd::bench::AddRunOptions(app, options.run);
  app.add_option_function<double>(
         "--pause_ms", [&options](double ms) { options.run.pairs.pause_seconds = ms / 1e3; },
         "Rest before each sample, in which the other side's threads give up spinning")
      ->check(CLI::Range(0.0, 10000.0))
      ->default_str(absl::StrCat(options.run.pairs.pause_seconds * 1e3));
  app.add_option("--threads", options.threads, "Threads of each side")
      ->check(CLI::Range(1, layerd::AvailableCpus()))
      ->capture_default_str();
  app.add_option("--onnxruntime", options.onnxruntime, "libonnxruntime.so.1");
  app.add_option("--models", options.models, "The folder that make_models.py wrote");
  app.add_option("--torch_worker", options.torch_worker, "torch_worker.py");
  CLI11_PARSE(app, argc, argv);
  try {
    return layerd::bench::Main(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peers_bench: %s\n", error.what());
    return 2;
  }
}
