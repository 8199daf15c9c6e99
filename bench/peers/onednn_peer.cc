// oneDNN, where bench/peers was built with it (LAYERD_PEERS_ONEDNN); versions 2 and 3.
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/peers/peer.h"

#ifdef LAYERD_PEERS_ONEDNN

#include <omp.h>

#include <unordered_map>
#include <utility>

#include "bench/random_data.h"
#include "lib/kernels/convert.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace layerd::bench {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

memory::data_type TypeOf(DType dtype) {
  return dtype == DType::kBFloat16 ? memory::data_type::bf16 : memory::data_type::f32;
}

dnnl::matmul::primitive_desc Describe(const dnnl::engine& engine, const memory::desc& x, const memory::desc& w,
                                      const memory::desc& y, const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, x, w, y, attributes};
#else
  return {dnnl::matmul::desc(x, w, y), attributes, engine};
#endif
}

class OneDnn : public Peer {
 public:
  explicit OneDnn(int threads) { omp_set_num_threads(threads); }

  std::string Name() const override { return "onednn"; }
  std::string Description() const override {
    const dnnl_version_t* version = dnnl_version();
    return absl::StrCat("oneDNN ", version->major, ".", version->minor, ".", version->patch,
                        ", weights reordered once, post-operations");
  }
  // It has no float16 on these CPUs before version 3, and no int8 that is scaled by blocks.
  bool Has(DType dtype) const override { return dtype == DType::kFloat32 || dtype == DType::kBFloat16; }

  bool UsesAmx(DType dtype) const override { return dtype == DType::kBFloat16 && OneDnnUsesAmx(); }

  PeerWork Prepare(const Arena& arena, LayerUnderTest& layer, int64_t rows) override {
    const auto [dim, hidden_dim] = layer.shape;
    const auto type = TypeOf(layer.dtype);
    const memory::desc x_desc({rows, dim}, type, Tag::ab), hidden_desc({rows, hidden_dim}, type, Tag::ab),
        y_desc({rows, dim}, memory::data_type::f32, Tag::ab), first_desc({dim, hidden_dim}, type, Tag::any),
        second_desc({hidden_dim, dim}, type, Tag::any);
    dnnl::post_ops swish, times_gate;
#if DNNL_VERSION_MAJOR >= 3
    swish.append_eltwise(dnnl::algorithm::eltwise_swish, 1.0f, 0.0f);
#else
    swish.append_eltwise(1.0f, dnnl::algorithm::eltwise_swish, 1.0f, 0.0f);
#endif
    times_gate.append_binary(dnnl::algorithm::binary_mul, hidden_desc);
    dnnl::primitive_attr gate_attributes, up_attributes;
    gate_attributes.set_post_ops(swish);
    up_attributes.set_post_ops(times_gate);
    const auto gate = Describe(engine_, x_desc, first_desc, hidden_desc, gate_attributes);
    const auto up = Describe(engine_, x_desc, first_desc, hidden_desc, up_attributes);
    const auto down = Describe(engine_, hidden_desc, second_desc, y_desc, {});

    // The weights depend on the layer and on the format that the library chooses for so many rows.
    struct State {
      Tensor input;
      dnnl::matmul gate, up, down;
      std::unordered_map<int, memory> gate_args, up_args, down_args;
    };
    const auto state = std::make_shared<State>();
    state->input = HugeTensor(layer.dtype, {rows, dim});
    NarrowFromFloat(layer.dtype, layer.input.floats(), state->input.mutable_data(), rows * dim);
    const auto output = std::make_shared<Tensor>(HugeTensor(DType::kFloat32, {rows, dim}));
    state->gate = dnnl::matmul(gate);
    state->up = dnnl::matmul(up);
    state->down = dnnl::matmul(down);
    const memory x(x_desc, engine_, state->input.mutable_data()), y(y_desc, engine_, output->mutable_data()),
        gated(hidden_desc, engine_), hidden(hidden_desc, engine_);
    state->gate_args = {{DNNL_ARG_SRC, x},
                        {DNNL_ARG_WEIGHTS, Reordered(*layer.weights.gate, gate.weights_desc())},
                        {DNNL_ARG_DST, gated}};
    state->up_args = {{DNNL_ARG_SRC, x},
                      {DNNL_ARG_WEIGHTS, Reordered(*layer.weights.up, up.weights_desc())},
                      {DNNL_ARG_DST, hidden},
                      {DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, gated}};
    state->down_args = {{DNNL_ARG_SRC, hidden},
                        {DNNL_ARG_WEIGHTS, Reordered(*layer.weights.down, down.weights_desc())},
                        {DNNL_ARG_DST, y}};
    const auto run = [this, state] {
      state->gate.execute(stream_, state->gate_args);
      state->up.execute(stream_, state->up_args);
      state->down.execute(stream_, state->down_args);
      stream_.wait();
    };
    return {.run = run, .output = output};
  }

 private:
  // Weights [out, in] in the format `wanted`.
  memory Reordered(const Tensor& weights, const memory::desc& wanted) {
    const memory::desc given({weights.dim(1), weights.dim(0)}, TypeOf(weights.dtype()), Tag::ba);
    memory from(given, engine_, const_cast<std::byte*>(weights.data()));
    memory to(wanted, engine_);
    dnnl::reorder(from, to).execute(stream_, from, to);
    stream_.wait();
    return to;
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
};

}  // namespace

absl::StatusOr<std::unique_ptr<Peer>> OneDnnPeer(int threads) { return std::make_unique<OneDnn>(threads); }

}  // namespace layerd::bench

#else

namespace layerd::bench {

absl::StatusOr<std::unique_ptr<Peer>> OneDnnPeer(int threads) {
  return absl::UnavailableError("bench/peers was built without it");
}

}  // namespace layerd::bench

#endif  // LAYERD_PEERS_ONEDNN
