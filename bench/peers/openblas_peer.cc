#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/peers/peer.h"
#include "bench/random_data.h"

namespace layerd::bench {
namespace {

// The entry points, by the enumerations of cblas.h.
struct Library {
  static constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;
  void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                const float* b, int ldb, float beta, float* c, int ldc);
  void (*sgemv)(int order, int trans, int m, int n, float alpha, const float* a, int lda, const float* x, int incx,
                float beta, float* y, int incy);
  void (*set_num_threads)(int threads);
  char* (*get_config)();
  char* (*get_corename)();
};

class OpenBlas : public Peer {
 public:
  OpenBlas(const Library& library, int threads) : library_(library) { library_.set_num_threads(threads); }

  std::string Name() const override { return "openblas"; }
  std::string Description() const override {
    return absl::StrCat(library_.get_config(), ", core ", library_.get_corename(), ", sgemm and at M = 1 sgemv");
  }
  bool Has(DType dtype) const override { return dtype == DType::kFloat32; }

  PeerWork Prepare(const Arena& arena, LayerUnderTest& layer, int64_t rows) override {
    struct State {
      Tensor gate, up;
    };
    const auto [dim, hidden_dim] = layer.shape;
    const auto state = std::make_shared<State>(
        State{HugeTensor(DType::kFloat32, {rows, hidden_dim}), HugeTensor(DType::kFloat32, {rows, hidden_dim})});
    const auto output = std::make_shared<Tensor>(HugeTensor(DType::kFloat32, {rows, dim}));
    const auto run = [this, &arena, &layer, state, output, n = rows * hidden_dim, rows] {
      float* gate = state->gate.mutable_floats();
      float* up = state->up.mutable_floats();
      Product(layer.input.floats(), rows, *layer.weights.gate, gate);
      Product(layer.input.floats(), rows, *layer.weights.up, up);
      // Not by OpenMP, whose threads would spin on while the library's own want to work.
      constexpr int64_t kGrain = 32768;
      arena.For(n, kGrain,
                [&](int64_t begin, int64_t end) { PlainGating(gate + begin, up + begin, gate + begin, end - begin); });
      Product(gate, rows, *layer.weights.down, output->mutable_floats());
    };
    return {.run = run, .output = output};
  }

 private:
  // y = x · wᵀ, w is [out, in].
  void Product(const float* x, int64_t rows, const Tensor& w, float* y) const {
    const int out = static_cast<int>(w.dim(0)), in = static_cast<int>(w.dim(1));
    if (rows == 1) {
      library_.sgemv(Library::kRowMajor, Library::kNoTrans, out, in, 1.0f, w.floats(), in, x, 1, 0.0f, y, 1);
    } else {
      library_.sgemm(Library::kRowMajor, Library::kNoTrans, Library::kTrans, static_cast<int>(rows), out, in, 1.0f, x,
                     in, w.floats(), in, 0.0f, y, out);
    }
  }

  const Library library_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Peer>> OpenBlasPeer(int threads) {
  // Its own choice on CPUs newer than it is the slowest core type; a user who set one keeps it.
  if (__builtin_cpu_supports("avx512f")) {
    setenv("OPENBLAS_CORETYPE", "SkylakeX", 0);
  } else if (__builtin_cpu_supports("avx2")) {
    setenv("OPENBLAS_CORETYPE", "Haswell", 0);
  }
  void* handle = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return absl::UnavailableError(dlerror());
  Library library{};
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  if (!find("cblas_sgemm", library.sgemm) || !find("cblas_sgemv", library.sgemv) ||
      !find("openblas_set_num_threads", library.set_num_threads) || !find("openblas_get_config", library.get_config) ||
      !find("openblas_get_corename", library.get_corename)) {
    return absl::UnavailableError("libopenblas.so.0 lacks an entry point");
  }
  return std::make_unique<OpenBlas>(library, threads);
}

}  // namespace layerd::bench
