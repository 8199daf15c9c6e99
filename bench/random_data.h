// Random normal data in huge pages: never zeros, which some machines multiply faster and the kernel may share.
#ifndef LAYERD_BENCH_RANDOM_DATA_H_
#define LAYERD_BENCH_RANDOM_DATA_H_

#include <cstdint>
#include <optional>

#include "lib/base/parallel.h"
#include "lib/base/tensor.h"

namespace layerd::bench {

// Memory for `shape`, zeroed, in huge pages where the system grants them (transparent_hugepage: always or madvise).
Tensor HugeTensor(DType dtype, Shape shape);

// N(0, deviation²), rounded to `dtype`; the same for the same seed whatever the number of threads.
Tensor NormalTensor(const Arena& arena, uint64_t seed, DType dtype, Shape shape, double deviation = 1.0);

// A matrix of weights, and the scales of an int8 one.
struct RandomWeights {
  Tensor values;
  std::optional<Tensor> scale;

  double num_bytes() const { return static_cast<double>(values.num_bytes() + (scale ? scale->num_bytes() : 0)); }
};

// As NormalTensor(), of two dimensions; int8 weights are [out, in] and quantised from float32 ones.
RandomWeights NormalWeights(const Arena& arena, uint64_t seed, DType dtype, Shape shape, double deviation);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_RANDOM_DATA_H_
