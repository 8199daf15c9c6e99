// The sizes that cells are measured at.
#ifndef LAYERD_BENCH_SHAPES_H_
#define LAYERD_BENCH_SHAPES_H_

#include <array>
#include <cstdint>
#include <vector>

#include "lib/base/dtype.h"

namespace layerd::bench {

struct FeedForwardShape {
  int64_t dim, hidden_dim;
};

// Of Llama 7B, of TinyLlama, and a small one whose sizes are no multiple of anything.
inline constexpr std::array<FeedForwardShape, 3> kShapes = {{{4096, 11008}, {2048, 5632}, {512, 1365}}};
inline constexpr std::array<int64_t, 9> kAllRows = {1, 2, 4, 8, 16, 32, 64, 256, 1024};
inline constexpr std::array<DType, 3> kFloatDTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr std::array<DType, 4> kWeightDTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                                       DType::kInt8};

// The rows of `rows` whose results are compared with the reference: the first, the middle and the last one.
inline std::vector<int64_t> SomeRows(int64_t rows) {
  std::vector<int64_t> some = {0};
  for (const int64_t row : {rows / 2, rows - 1}) {
    if (row > some.back()) some.push_back(row);
  }
  return some;
}

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_SHAPES_H_
