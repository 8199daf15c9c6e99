// Cells of preparing a layer: its weights packed into panels, with the fresh memory that the panels take ("layer"), and
// into panels that are there already ("panels_of_…"); a matrix quantised.
#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/cell.h"
#include "bench/feed_forward_layer.h"
#include "bench/random_data.h"
#include "bench/shapes.h"
#include "lib/kernels/panels.h"
#include "lib/layers/layer.h"
#include "lib/layers/packed_feed_forward.h"
#include "lib/layers/quantize.h"

namespace layerd::bench {
namespace {

// Packing loses nothing: any difference is wrong.
double DifferenceOf(const Tensor& packed, const Tensor& original) {
  return SameBits(packed, original) ? 0.0 : std::numeric_limits<double>::infinity();
}

Work PrepareLayer(const Arena& arena, FeedForwardShape shape, DType dtype) {
  const std::shared_ptr<LayerUnderTest> layer = LayerOf(arena, shape, dtype);
  const auto packed = std::make_shared<std::optional<PackedFeedForward>>();
  Work work;
  work.run = [&arena, layer, packed] {
    packed->reset();  // so that no two are held
    packed->emplace(PackedFeedForward::Of(arena, layer->spec, layer->weights));
  };
  work.error = [layer, packed] {
    const FeedForwardWeights unpacked = (*packed)->Unpacked();
    double difference = 0;
    for (const auto& [role, member] : kFeedForwardRoles) {
      const std::optional<Tensor>& weight = layer->weights.*member;
      if (weight) difference = std::max(difference, DifferenceOf(*(unpacked.*member), *weight));
    }
    return difference;
  };
  work.bytes = 2 * WeightBytes(*layer);
  return work;
}

Work PreparePanels(const Arena& arena, FeedForwardShape shape, DType dtype, WeightLayout layout) {
  struct State {
    RandomWeights weights;
    Panels panels;
  };
  const Shape lines =
      layout == WeightLayout::kOutIn ? Shape{shape.hidden_dim, shape.dim} : Shape{shape.dim, shape.hidden_dim};
  const auto state = std::make_shared<State>();
  state->weights = NormalWeights(arena, 11, dtype, lines, 1.0);
  state->panels = Panels(dtype, shape.dim, shape.hidden_dim);
  WeightView view{dtype, layout, shape.dim, shape.hidden_dim, state->weights.values.data()};
  if (state->weights.scale) view.scale = state->weights.scale->data();
  Work work;
  work.run = [&arena, state, view, layout] {
    arena.For(state->panels.panels(), 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kPanelOutputs;
      const int64_t line = layout == WeightLayout::kOutIn ? view.in : 1;  // elements from one output to the next
      WeightView part = view;
      part.out = std::min(end * kPanelOutputs, view.out) - first;
      part.data = view.data + first * line * static_cast<int64_t>(SizeOf(view.dtype));
      if (layout == WeightLayout::kInOut) part.stride = view.out;
      if (view.scale != nullptr) part.scale = view.scale + first * state->weights.scale->dim(1) * 2;
      state->panels.Pack(part, 0, first);
    });
  };
  work.error = [state, layout] {
    const auto& [values, scale] = state->weights;
    Tensor unpacked = HugeTensor(values.dtype(), values.shape());
    WeightView whole{values.dtype(), layout, state->panels.in(), state->panels.out(), unpacked.data()};
    Tensor unpacked_scale = scale ? HugeTensor(scale->dtype(), scale->shape()) : Tensor();
    if (scale) whole.scale = unpacked_scale.data();
    state->panels.Unpack(whole, 0, 0);
    return std::max(DifferenceOf(unpacked, values), scale ? DifferenceOf(unpacked_scale, *scale) : 0.0);
  };
  work.bytes = 2 * state->weights.num_bytes();
  return work;
}

Work PrepareQuantizing(const Arena& arena, FeedForwardShape shape, DType source_dtype) {
  struct State {
    Tensor source;
    std::optional<QuantizedMatrix> quantized;
  };
  const auto state = std::make_shared<State>();
  state->source = NormalTensor(arena, 11, source_dtype, {shape.hidden_dim, shape.dim});
  Work work;
  work.run = [&arena, state] { state->quantized = *QuantizeMatrix(arena, "up", state->source, WeightLayout::kOutIn); };
  work.error = [state, shape] {
    std::vector<float> got;
    std::vector<double> want;
    const int64_t blocks = state->quantized->scale.dim(1);
    for (int64_t i = 0; i < 16 * shape.dim; ++i) {  // of the first 16 outputs
      const int64_t block = i / shape.dim * blocks + i % shape.dim / kScaleBlock;
      got.push_back(state->quantized->values.At(i) * state->quantized->scale.At(block));
      want.push_back(state->source.At(i));
    }
    return RelativeError(got, want);
  };
  work.max_error = 0.03;  // half a step of 1/127 of the largest of 32 values, up to some 6 times the rms
  work.bytes = static_cast<double>(state->source.num_bytes()) +
               static_cast<double>(state->source.num_elements()) * (1 + 2.0 / static_cast<double>(kScaleBlock));
  return work;
}

}  // namespace

void AddPackingCells(const std::vector<int>& threads, std::vector<Cell>& cells) {
  const auto add = [&](CellName name, const std::function<Work(const Arena&)>& prepare) {
    for (const int count : threads) {
      name.threads = count;
      cells.push_back({.name = name, .bound = Bound::kCopy, .prepare = prepare});
    }
  };
  for (const FeedForwardShape shape : kShapes) {
    for (const DType dtype : kWeightDTypes) {
      CellName name{"pack", "layer", std::string(Name(dtype)), shape.dim, shape.hidden_dim};
      add(name, [=](const Arena& arena) { return PrepareLayer(arena, shape, dtype); });
      for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
        if (dtype == DType::kInt8 && layout == WeightLayout::kInOut) continue;
        name.variant = layout == WeightLayout::kOutIn ? "panels_of_out_in" : "panels_of_in_out";
        add(name, [=](const Arena& arena) { return PreparePanels(arena, shape, dtype, layout); });
      }
    }
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const CellName name{"quantize", "", std::string(Name(dtype)), shape.dim, shape.hidden_dim};
      add(name, [=](const Arena& arena) { return PrepareQuantizing(arena, shape, dtype); });
    }
  }
}

}  // namespace layerd::bench
