// A library of others that computes the SwiGLU layer, run beside ours in one process (or, PyTorch, in another).
//
// Threads: one at a time.
#ifndef LAYERD_BENCH_PEERS_PEER_H_
#define LAYERD_BENCH_PEERS_PEER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/feed_forward_layer.h"
#include "lib/base/dtype.h"
#include "lib/base/parallel.h"
#include "lib/base/tensor.h"

namespace layerd::bench {

// The peer's computation of a layer for so many rows: in this process `run`, which leaves its result in `output` (float32
// [rows, dim]); in another process `sample`, which answers the mean seconds of a call, and `error`.
struct PeerWork {
  std::function<void()> run;
  std::shared_ptr<Tensor> output;
  std::function<double()> sample;
  std::function<double()> error;
};

class Peer {
 public:
  virtual ~Peer() = default;
  virtual std::string Name() const = 0;         // "onednn": part of the names of its cells
  virtual std::string Description() const = 0;  // "oneDNN 2.6.3, weights reordered once"
  // Whether it has a layer with such weights.
  virtual bool Has(DType dtype) const = 0;
  // Whether it multiplies such weights by AMX, which no product in our order can use: its cells are named for that, and
  // have no goal.
  virtual bool UsesAmx(DType dtype) const { return false; }
  // `layer` outlives what is returned. Takes the first `rows` rows of the layer's input, in the weights' dtype where that
  // is a float one.
  virtual PeerWork Prepare(const Arena& arena, LayerUnderTest& layer, int64_t rows) = 0;
};

// Each is UNAVAILABLE, with the reason, where the library is not installed.

// Products by sgemm (at M = 1 by sgemv) on float32 weights as PyTorch keeps them, and a plain loop between them.
absl::StatusOr<std::unique_ptr<Peer>> OpenBlasPeer(int threads);
// Products with weights reordered once into the library's own format, SiLU and gating as post-operations.
absl::StatusOr<std::unique_ptr<Peer>> OneDnnPeer(int threads);
// The models that make_models.py writes to the folder `models`, run by the library `path` (libonnxruntime.so.1).
absl::StatusOr<std::unique_ptr<Peer>> OnnxRuntimePeer(int threads, const std::string& path, const std::string& models);
// torch_worker.py, as a process of its own with random weights of its own.
absl::StatusOr<std::unique_ptr<Peer>> TorchPeer(int threads, const std::string& script, double sample_seconds);

// Whether oneDNN, by itself or inside PyTorch, uses AMX for bfloat16: the CPU has it and DNNL_MAX_CPU_ISA is not set.
bool OneDnnUsesAmx();

// out[i] = gate[i] · σ(gate[i]) · up[i], as a plain program writes it; `out` may be `gate`.
extern "C" void PlainGating(const float* gate, const float* up, float* out, int64_t n);
// RMSNorm of `rows` rows, sums in float32, divided over so many OpenMP threads, as a plain program writes it.
extern "C" void PlainRmsNorm(const float* in, const float* gamma, float* out, int64_t rows, int64_t dim, float epsilon,
                             int threads);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_PEERS_PEER_H_
