// A SwiGLU layer of random weights with what belongs to it: packed weights, input, and results in float64.
//
// Threads: one at a time.
#ifndef LAYERD_BENCH_FEED_FORWARD_LAYER_H_
#define LAYERD_BENCH_FEED_FORWARD_LAYER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "bench/shapes.h"
#include "lib/base/parallel.h"
#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/packed_feed_forward.h"

namespace layerd::bench {

struct LayerUnderTest {
  FeedForwardShape shape;
  DType dtype;
  FeedForwardSpec spec;
  FeedForwardWeights weights;                        // [out, in]
  std::optional<PackedFeedForward> packed;           // see PackedOf()
  Tensor input;                                      // float32, for the largest M; smaller ones take its first rows
  std::map<int64_t, std::vector<double>> reference;  // of a row of the input, once it was wanted
};

// Cells of the same layer share it; only the one asked for last is kept, since the largest takes a gigabyte.
std::shared_ptr<LayerUnderTest> LayerOf(const Arena& arena, FeedForwardShape shape, DType dtype);

// The layer packed, which is done when it is asked for first.
const PackedFeedForward& PackedOf(const Arena& arena, LayerUnderTest& layer);

// Bytes of the three matrices and their scales.
double WeightBytes(const LayerUnderTest& layer);

// Some rows of a matrix, sharing its memory.
Tensor RowsOf(const Tensor& matrix, int64_t first, int64_t count);

// max|y − ref| / rms(ref) of `output`, float32, over the first, the middle and the last of its rows; it is what the
// layer gives for so many rows of its input.
double FeedForwardError(const Arena& arena, LayerUnderTest& layer, const Tensor& output);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_FEED_FORWARD_LAYER_H_
