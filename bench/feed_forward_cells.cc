// Cells of the SwiGLU layer, with weights that come with the call ("inline") and packed beforehand ("packed"). Input and
// output are float32 whatever the weights are, so that the error tells of the products.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/cell.h"
#include "bench/feed_forward_layer.h"
#include "bench/shapes.h"
#include "lib/layers/feed_forward.h"

namespace layerd::bench {
namespace {

// The multiples of the limit that packed layers of d 4096, h 11008 shall reach on 2 threads.
std::optional<double> GoalOf(const CellName& name) {
  static const std::map<int64_t, double> wide = {{1, 1.06},  {4, 1.12},   {16, 1.45},
                                                 {64, 1.28}, {256, 1.14}, {1024, 1.10}};
  static const std::map<int64_t, double> narrow = {{1, 1.12},  {4, 1.25},   {16, 1.65},
                                                   {64, 1.40}, {256, 1.17}, {1024, 1.13}};
  static const std::map<int64_t, double> int8 = {{1, 1.25},  {4, 1.60},   {16, 1.70},
                                                 {64, 1.45}, {256, 1.18}, {1024, 1.14}};
  if (name.variant != "packed" || name.dim != 4096 || name.threads != 2) return std::nullopt;
  const auto& goals = name.dtype == "float32" ? wide : name.dtype == "int8" ? int8 : narrow;
  const auto found = goals.find(name.rows);
  return found == goals.end() ? std::nullopt : std::optional(found->second);
}

Work Prepare(const Arena& arena, const CellName& name, FeedForwardShape shape, DType dtype) {
  const std::shared_ptr<LayerUnderTest> layer = LayerOf(arena, shape, dtype);
  const bool is_packed = name.variant == "packed";
  const PackedFeedForward* packed = is_packed ? &PackedOf(arena, *layer) : nullptr;
  const Tensor input = RowsOf(layer->input, 0, name.rows);
  const auto output = std::make_shared<Tensor>();
  Work work;
  work.run = [&arena, layer, input, output, packed] {
    *output = (packed != nullptr ? FeedForward(arena, *packed, input, std::nullopt, false)
                                 : FeedForward(arena, layer->spec, layer->weights, input, std::nullopt, false))
                  ->output;
  };
  work.error = [&arena, layer, output] { return FeedForwardError(arena, *layer, *output); };
  work.flops = FeedForwardFlops(layer->spec, {name.rows, shape.dim, shape.hidden_dim, shape.dim});
  work.bytes = WeightBytes(*layer) + static_cast<double>(input.num_bytes());
  return work;
}

}  // namespace

void AddFeedForwardCells(const std::vector<int>& threads, std::vector<Cell>& cells) {
  for (const FeedForwardShape shape : kShapes) {
    for (const DType dtype : kWeightDTypes) {
      for (const char* variant : {"packed", "inline"}) {
        for (const int count : threads) {
          for (const int64_t rows : kAllRows) {
            const CellName name{"feed_forward", variant, std::string(Name(dtype)), shape.dim, shape.hidden_dim,
                                rows,           count};
            cells.push_back({.name = name, .goal = GoalOf(name), .prepare = [=](const Arena& arena) {
                               return Prepare(arena, name, shape, dtype);
                             }});
          }
        }
      }
    }
  }
}

}  // namespace layerd::bench
