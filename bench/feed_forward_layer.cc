#include "bench/feed_forward_layer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "bench/cell.h"
#include "bench/random_data.h"
#include "lib/kernels/convert.h"
#include "lib/layers/layer.h"
#include "lib/layers/seeded.h"
#include "lib/reference/reference.h"

namespace layerd::bench {

std::shared_ptr<LayerUnderTest> LayerOf(const Arena& arena, FeedForwardShape shape, DType dtype) {
  static std::shared_ptr<LayerUnderTest> last;
  if (last == nullptr || last->shape.dim != shape.dim || last->dtype != dtype) {
    last = nullptr;
    auto layer = std::make_shared<LayerUnderTest>();
    layer->shape = shape;
    layer->dtype = dtype;
    layer->spec = SwiGluSpec();
    const auto put = [&](uint64_t seed, int64_t out, int64_t in, std::optional<Tensor>& values,
                         std::optional<Tensor>& scale) {
      RandomWeights random = NormalWeights(arena, seed, dtype, {out, in}, 1 / std::sqrt(static_cast<double>(in)));
      values = std::move(random.values);
      scale = std::move(random.scale);
    };
    FeedForwardWeights& weights = layer->weights;
    put(11, shape.hidden_dim, shape.dim, weights.gate, weights.gate_scale);
    put(12, shape.hidden_dim, shape.dim, weights.up, weights.up_scale);
    put(13, shape.dim, shape.hidden_dim, weights.down, weights.down_scale);
    const DType input_dtype = IsFloat(dtype) ? dtype : DType::kFloat32;
    layer->input = NormalTensor(arena, 21, DType::kFloat32, {kAllRows.back(), shape.dim});
    const Tensor narrow = NormalTensor(arena, 21, input_dtype, layer->input.shape());
    WidenToFloat(input_dtype, narrow.data(), layer->input.mutable_floats(), narrow.num_elements());
    last = layer;
  }
  return last;
}

Tensor RowsOf(const Tensor& matrix, int64_t first, int64_t count) {
  const size_t width = matrix.num_bytes() / static_cast<size_t>(matrix.dim(0));
  return *Tensor::Adopt(matrix.dtype(), {count, matrix.dim(1)}, std::make_shared<Tensor>(matrix),
                        matrix.bytes().subspan(static_cast<size_t>(first) * width, static_cast<size_t>(count) * width));
}

double FeedForwardError(const Arena& arena, LayerUnderTest& layer, const Tensor& output) {
  const std::vector<int64_t> rows = SomeRows(output.dim(0));
  std::vector<int64_t> missing;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(missing),
               [&](int64_t row) { return layer.reference[row].empty(); });
  arena.For(static_cast<int64_t>(missing.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      layer.reference.at(missing[i]) =
          reference::FeedForward(layer.spec, layer.weights, RowsOf(layer.input, missing[i], 1)).output;
    }
  });
  std::vector<float> got;
  std::vector<double> want;
  for (const int64_t row : rows) {
    const float* values = output.floats() + row * output.dim(1);
    got.insert(got.end(), values, values + output.dim(1));
    want.insert(want.end(), layer.reference[row].begin(), layer.reference[row].end());
  }
  return RelativeError(got, want);
}

const PackedFeedForward& PackedOf(const Arena& arena, LayerUnderTest& layer) {
  if (!layer.packed) layer.packed = PackedFeedForward::Of(arena, layer.spec, layer.weights);
  return *layer.packed;
}

double WeightBytes(const LayerUnderTest& layer) {
  size_t bytes = 0;
  for (const auto& [role, member] : kFeedForwardRoles) {
    if (const std::optional<Tensor>& weight = layer.weights.*member) bytes += weight->num_bytes();
  }
  return static_cast<double>(bytes);
}

}  // namespace layerd::bench
