#include "bench/random_data.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numbers>
#include <utility>
#include <vector>

#include "lib/kernels/convert.h"
#include "lib/layers/quantize.h"

namespace layerd::bench {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// SplitMix64 (Steele, Lea & Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

// By Box and Muller, two values from one random number.
void FillNormal(uint64_t seed, float deviation, float* out, int64_t n) {
  Random random(seed);
  for (int64_t i = 0; i < n; i += 2) {
    const uint64_t bits = random.Next();
    const float unit = static_cast<float>((bits >> 40) + 1) * 0x1p-24f;
    const float angle = 2 * std::numbers::pi_v<float> * static_cast<float>(bits & 0xFFFFFF) * 0x1p-24f;
    const float radius = deviation * std::sqrt(-2.0f * std::log(unit));
    out[i] = radius * std::cos(angle);
    if (i + 1 < n) out[i + 1] = radius * std::sin(angle);
  }
}

}  // namespace

Tensor HugeTensor(DType dtype, Shape shape) {
  size_t bytes = SizeOf(dtype);
  for (const int64_t dim : shape) bytes *= static_cast<size_t>(dim);
  const size_t mapped = std::max(kHugePage, (bytes + kHugePage - 1) / kHugePage * kHugePage);
  std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(kHugePage, mapped)),
                                    [](std::byte* p) { std::free(p); });
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory.get(), mapped, MADV_HUGEPAGE);
  std::memset(memory.get(), 0, mapped);
  const absl::Span<const std::byte> data(memory.get(), bytes);
  return *Tensor::Adopt(dtype, std::move(shape), memory, data);
}

Tensor NormalTensor(const Arena& arena, uint64_t seed, DType dtype, Shape shape, double deviation) {
  Tensor tensor = HugeTensor(dtype, std::move(shape));
  constexpr int64_t kChunk = 1 << 16;
  const int64_t n = tensor.num_elements();
  std::byte* data = tensor.mutable_data();
  arena.For((n + kChunk - 1) / kChunk, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values(kChunk);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * kChunk, count = std::min(kChunk, n - first);
      FillNormal(Random(seed + static_cast<uint64_t>(chunk) * 0xD1B54A32D192ED03u).Next(),
                 static_cast<float>(deviation), values.data(), count);
      NarrowFromFloat(dtype, values.data(), data + first * static_cast<int64_t>(SizeOf(dtype)), count);
    }
  });
  return tensor;
}

RandomWeights NormalWeights(const Arena& arena, uint64_t seed, DType dtype, Shape shape, double deviation) {
  if (dtype != DType::kInt8) return {NormalTensor(arena, seed, dtype, std::move(shape), deviation), std::nullopt};
  const Tensor source = NormalTensor(arena, seed, DType::kFloat32, std::move(shape), deviation);
  QuantizedMatrix quantized = *QuantizeMatrix(arena, "up", source, WeightLayout::kOutIn);
  // Into huge pages, as other weights are.
  const auto huge = [](const Tensor& tensor) {
    Tensor copy = HugeTensor(tensor.dtype(), tensor.shape());
    std::memcpy(copy.mutable_data(), tensor.data(), tensor.num_bytes());
    return copy;
  };
  return {huge(quantized.values), huge(quantized.scale)};
}

}  // namespace layerd::bench
