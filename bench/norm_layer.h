// RMSNorm and LayerNorm of random rows, as the cells and the comparison with peers compute them.
//
// Threads: one at a time.
#ifndef LAYERD_BENCH_NORM_LAYER_H_
#define LAYERD_BENCH_NORM_LAYER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "bench/cell.h"
#include "lib/base/parallel.h"
#include "lib/base/tensor.h"
#include "lib/layers/normalize.h"

namespace layerd::bench {

struct NormUnderTest {
  NormalizeSpec spec;
  NormalizeInputs inputs;  // [rows, kNormDim] and γ, β in float32
  Tensor output;
};

inline constexpr int64_t kNormDim = 4096;
inline constexpr int64_t kNormRows[] = {1, 64, 4096, 16384};

std::shared_ptr<NormUnderTest> NormOf(const Arena& arena, NormKind kind, DType dtype, int64_t rows);

// Calls of the kernel, into memory that is there already, and of the layer, with the fresh memory of its answer.
std::function<void()> NormKernelOf(const Arena& arena, const std::shared_ptr<NormUnderTest>& norm);
std::function<void()> NormLayerOf(const Arena& arena, const std::shared_ptr<NormUnderTest>& norm);

// max|y − ref| / rms(ref) of what is in norm.output, over its first, middle and last row.
double NormError(const NormUnderTest& norm);

// A cell's work: `run` with the error and the bytes of `norm`.
Work NormWork(const std::shared_ptr<NormUnderTest>& norm, std::function<void()> run);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_NORM_LAYER_H_
