#include "lib/layers/feed_forward_operands.h"

#include <algorithm>
#include <cstring>

#include "lib/base/shape.h"
#include "lib/kernels/convert.h"
#include "lib/kernels/normalize_rows.h"
#include "lib/kernels/scratch.h"
#include "lib/layers/check_dtype.h"

namespace layerd {
namespace {

// Rows are computed in chunks whose widest values take at most so many floats, so that a small call with a wide layer
// cannot ask for memory out of proportion to its own size, and the hidden values of a chunk stay near.
constexpr int64_t kMaxChunkFloats = int64_t{1} << 22;

WeightView ViewOf(const FeedForwardSpec& spec, const Tensor& matrix, const std::optional<Tensor>& scale) {
  const bool out_in = spec.layout == WeightLayout::kOutIn;
  WeightView view = {matrix.dtype(), spec.layout, matrix.dim(out_in ? 1 : 0), matrix.dim(out_in ? 0 : 1),
                     matrix.data()};
  if (scale) view.scale = scale->data();
  return view;
}

// The half of a packed matrix that is the gate (0) or up (1).
WeightView HalfOf(const FeedForwardSpec& spec, const FeedForwardWeights& weights, int half) {
  WeightView view = ViewOf(spec, *weights.gate_up, weights.gate_up_scale);
  const bool interleaved = spec.packing == GateUpPacking::kInterleaved;
  const bool out_in = spec.layout == WeightLayout::kOutIn;
  const int64_t scale_blocks = (view.in + kScaleBlock - 1) / kScaleBlock;
  view.out /= 2;
  const int64_t first = half * (interleaved ? 1 : view.out);  // output
  view.stride = !out_in ? 2 * view.out : interleaved ? 2 * view.in : view.in;
  view.step = !out_in && interleaved ? 2 : 1;
  if (view.data != nullptr) {
    view.data += first * (out_in ? view.in : 1) * static_cast<int64_t>(SizeOf(view.dtype));
  }
  view.scale_stride = interleaved ? 2 * scale_blocks : scale_blocks;
  if (view.scale != nullptr) view.scale += first * scale_blocks * 2;
  return view;
}

bool IsPacked(const FeedForwardSpec& spec) {
  return spec.form == FeedForwardForm::kGated && spec.packing != GateUpPacking::kSeparate;
}

Gating GatingOf(const FeedForwardSpec& spec) {
  Gating gating{spec.activation};
  if (spec.gate_max) gating.gate_max = static_cast<float>(*spec.gate_max);
  if (spec.up_limit) gating.up_limit = static_cast<float>(*spec.up_limit);
  gating.up_offset = static_cast<float>(spec.up_offset);
  return gating;
}

Shape WithLast(Shape shape, int64_t last) {
  shape.back() = last;
  return shape;
}

// One chunk of rows after another; memory for all of them is the calling thread's own, and kept for the next call.
class Computation {
 public:
  Computation(const Arena& arena, const FeedForwardSpec& spec, const FeedForwardExtent& extent,
              const FeedForwardOperands& operands, const Tensor& input, FeedForwardOutputs& outputs)
      : arena_(arena),
        spec_(spec),
        extent_(extent),
        operands_(operands),
        input_(input),
        outputs_(outputs),
        gating_(GatingOf(spec)) {
    const int64_t widest = std::max({extent.dim, extent.hidden_dim, extent.out_dim});
    chunks_ = (extent.rows * widest + kMaxChunkFloats - 1) / kMaxChunkFloats;
    chunks_ = std::clamp<int64_t>(chunks_, 1, extent.rows);
    const int64_t chunk_rows = (extent.rows + chunks_ - 1) / chunks_;
    const int64_t hidden_copies = spec.inner_norm ? 3 : 1;
    x_ = Scratch::OfCall().Get(
        static_cast<size_t>(chunk_rows * (extent.dim + hidden_copies * extent.hidden_dim) + 2 * kLineFloats));
    hidden_ = x_ + RoundUp(chunk_rows * extent.dim);
    hidden_rows_ = hidden_ + RoundUp(chunk_rows * extent.hidden_dim);
  }

  int64_t chunks() const { return chunks_; }

  void Run(int64_t chunk) {
    first_row_ = extent_.rows * chunk / chunks_;
    const int64_t rows = extent_.rows * (chunk + 1) / chunks_ - first_row_;
    const Factor& first = operands_.gate ? *operands_.gate : operands_.up;
    const Factor* second = operands_.gate ? &operands_.up : nullptr;
    const RowBlocks x = Input(rows, ProductGroupRows(rows, first, second));
    RowBlocks hidden(hidden_, rows, extent_.hidden_dim, ProductGroupRows(rows, operands_.down, nullptr));
    Product(arena_, x, first, second, [&](const ProductTile& tile) { TakeHidden(tile, hidden); });
    if (spec_.inner_norm) Normalize(hidden);
    Product(arena_, hidden, operands_.down, nullptr, [&](const ProductTile& tile) { TakeOutput(tile); });
  }

 private:
  static constexpr int64_t kLineFloats = 16;
  static int64_t RoundUp(int64_t floats) { return (floats + kLineFloats - 1) / kLineFloats * kLineFloats; }

  RowBlocks Input(int64_t rows, int64_t group_rows) {
    const int64_t row_bytes = extent_.dim * static_cast<int64_t>(SizeOf(input_.dtype()));
    const std::byte* bytes = input_.data() + first_row_ * row_bytes;
    if (rows == 1 && input_.dtype() == DType::kFloat32) {  // lies as it should already; it is only read
      return {const_cast<float*>(reinterpret_cast<const float*>(bytes)), rows, extent_.dim, group_rows};
    }
    RowBlocks x(x_, rows, extent_.dim, group_rows);
    arena_.For(rows, Grain(extent_.dim), [&](int64_t begin, int64_t end) {
      x.PutRows(begin, end - begin, input_.dtype(), bytes + begin * row_bytes);
    });
    return x;
  }

  // Copies a tile to the rows of an answered tensor.
  void Answer(const ProductTile& tile, const float* values, std::optional<Tensor>& to) const {
    if (!to) return;
    float* at = to->mutable_floats() + (first_row_ + tile.row) * extent_.hidden_dim + tile.col;
    for (int64_t r = 0; r < tile.rows; ++r) {
      std::copy_n(values + r * tile.stride, tile.cols, at + r * extent_.hidden_dim);
    }
  }

  void TakeHidden(const ProductTile& tile, RowBlocks& hidden) const {
    const int64_t n = tile.rows * tile.stride;
    if (operands_.gate) {
      Answer(tile, tile.first, outputs_.gate);
      Answer(tile, tile.second, outputs_.up);
      ApplyGating(gating_, tile.first, tile.second, tile.first, n);
    } else {
      Answer(tile, tile.first, outputs_.up);
      ApplyActivation(spec_.activation, tile.first, tile.first, n);
    }
    Answer(tile, tile.first, outputs_.hidden);
    if (!spec_.inner_norm) {
      hidden.Put(tile.row, tile.rows, tile.col, tile.cols, tile.first, tile.stride);
      return;
    }
    for (int64_t r = 0; r < tile.rows; ++r) {
      std::copy_n(tile.first + r * tile.stride, tile.cols,
                  hidden_rows_ + (tile.row + r) * extent_.hidden_dim + tile.col);
    }
  }

  // The inner norm needs whole rows.
  void Normalize(RowBlocks& hidden) const {
    float* const normed = outputs_.normed ? outputs_.normed->mutable_floats() + first_row_ * extent_.hidden_dim
                                          : hidden_rows_ + hidden.rows() * extent_.hidden_dim;
    const NormalizeRowsArgs norm{.kind = NormKind::kRmsNorm,
                                 .epsilon = spec_.inner_norm->epsilon.value_or(kDefaultInnerNormEpsilon),
                                 .dim = extent_.hidden_dim,
                                 .group_size = extent_.hidden_dim,
                                 .input_dtype = DType::kFloat32,
                                 .output_dtype = DType::kFloat32,
                                 .input = reinterpret_cast<const std::byte*>(hidden_rows_),
                                 .gamma = operands_.inner_norm_gamma,
                                 .output = reinterpret_cast<std::byte*>(normed)};
    arena_.For(hidden.rows(), Grain(extent_.hidden_dim), [&](int64_t begin, int64_t end) {
      NormalizeRows(norm, begin, end);
      hidden.PutRows(begin, end - begin, DType::kFloat32,
                     reinterpret_cast<const std::byte*>(normed + begin * extent_.hidden_dim));
    });
  }

  void TakeOutput(const ProductTile& tile) const {
    Tensor& output = outputs_.output;
    const DType dtype = output.dtype();
    const int64_t size = static_cast<int64_t>(SizeOf(dtype));
    std::byte* at = output.mutable_data() + ((first_row_ + tile.row) * extent_.out_dim + tile.col) * size;
    for (int64_t r = 0; r < tile.rows; ++r) {
      NarrowFromFloat(dtype, tile.first + r * tile.stride, at + r * extent_.out_dim * size, tile.cols);
    }
  }

  // Pieces of work of some 10 µs.
  static int64_t Grain(int64_t elements) {
    constexpr int64_t kElementsPerTask = 16384;
    return std::max<int64_t>(1, kElementsPerTask / elements);
  }

  const Arena& arena_;
  const FeedForwardSpec& spec_;
  const FeedForwardExtent& extent_;
  const FeedForwardOperands& operands_;
  const Tensor& input_;
  FeedForwardOutputs& outputs_;
  const Gating gating_;
  int64_t chunks_;
  float* x_;
  float* hidden_;
  float* hidden_rows_;  // row-major: what the inner norm takes, and then what it gives where that is not answered
  int64_t first_row_ = 0;
};

}  // namespace

WeightView GateViewOf(const FeedForwardSpec& spec, const FeedForwardWeights& weights) {
  return IsPacked(spec) ? HalfOf(spec, weights, 0) : ViewOf(spec, *weights.gate, weights.gate_scale);
}
WeightView UpViewOf(const FeedForwardSpec& spec, const FeedForwardWeights& weights) {
  return IsPacked(spec) ? HalfOf(spec, weights, 1) : ViewOf(spec, *weights.up, weights.up_scale);
}
WeightView DownViewOf(const FeedForwardSpec& spec, const FeedForwardWeights& weights) {
  return ViewOf(spec, *weights.down, weights.down_scale);
}

GateUpBiases::GateUpBiases(const FeedForwardSpec& spec, const FeedForwardWeights& weights) {
  if (weights.gate_bias) gate_ = weights.gate_bias->ToFloats();
  if (weights.up_bias) up_ = weights.up_bias->ToFloats();
  if (!weights.gate_up_bias) return;
  const std::vector<float> both = weights.gate_up_bias->ToFloats();
  const size_t hidden_dim = both.size() / 2;
  const bool interleaved = spec.packing == GateUpPacking::kInterleaved;
  for (size_t i = 0; i < hidden_dim; ++i) {
    gate_.push_back(both[interleaved ? 2 * i : i]);
    up_.push_back(both[interleaved ? 2 * i + 1 : hidden_dim + i]);
  }
}

absl::StatusOr<FeedForwardOutputs> ComputeFeedForward(const Arena& arena, const FeedForwardSpec& spec,
                                                      const FeedForwardExtent& extent,
                                                      const FeedForwardOperands& operands, const Tensor& input,
                                                      std::optional<DType> output_dtype, bool intermediates,
                                                      const StillWanted& still_wanted, const MemoryPlace* place) {
  if (auto status = CheckFloat("output_dtype", output_dtype); !status.ok()) return status;
  FeedForwardOutputs outputs;
  outputs.output =
      Tensor::AllocateAt(place, output_dtype.value_or(input.dtype()), WithLast(input.shape(), extent.out_dim));
  if (intermediates) {
    const Shape shape = WithLast(input.shape(), extent.hidden_dim);
    if (operands.gate) outputs.gate = Tensor::Allocate(DType::kFloat32, shape);
    outputs.up = Tensor::Allocate(DType::kFloat32, shape);
    outputs.hidden = Tensor::Allocate(DType::kFloat32, shape);
    if (spec.inner_norm) outputs.normed = Tensor::Allocate(DType::kFloat32, shape);
  }
  if (extent.rows == 0) return outputs;
  Computation computation(arena, spec, extent, operands, input, outputs);
  for (int64_t chunk = 0; chunk < computation.chunks(); ++chunk) {
    if (still_wanted) {
      if (auto status = still_wanted(); !status.ok()) return status;
    }
    computation.Run(chunk);
  }
  return outputs;
}

}  // namespace layerd
