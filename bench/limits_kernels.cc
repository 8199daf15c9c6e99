#include "bench/limits_kernels.h"

#include "lib/kernels/highway_targets.h"
#include "lib/kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/limits_kernels.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace layerd::bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int64_t kLanes = hn::MaxLanes(D());
// A multiply-add takes 4 cycles and two begin in each, so 8 sums are the least that keeps them busy; more, as far as
// the registers go (two hold the factor and the summand).
constexpr int kSums = HWY_TARGET == HWY_AVX3 ? 24 : 12;
constexpr int kLoads = 8;

float SumOf(const V* sums, int count) {
  const D d;
  V total = sums[0];
  for (int i = 1; i < count; ++i) total = hn::Add(total, sums[i]);
  return hn::GetLane(hn::SumOfLanes(d, total));
}

float Forward(const float* HWY_RESTRICT in, int64_t n) {
  const D d;
  V sums[kLoads];
#pragma GCC unroll 8
  for (int v = 0; v < kLoads; ++v) sums[v] = hn::Zero(d);
  for (int64_t i = 0; i < n; i += kLoads * kLanes) {
#pragma GCC unroll 8
    for (int v = 0; v < kLoads; ++v) sums[v] = hn::Add(sums[v], hn::Load(d, in + i + v * kLanes));
  }
  return SumOf(sums, kLoads);
}

float FourStreams(const float* HWY_RESTRICT in, int64_t n) {
  constexpr int kStreams = 4;
  constexpr int64_t kLine = 16;               // floats of a cache line
  constexpr int64_t kStep = 2 * kLine;        // of each stream in a turn
  constexpr int64_t kAhead = 16 * 2 * kLine;  // how far ahead it is fetched
  const D d;
  const int64_t quarter = n / kStreams;
  V sums[kStreams];
#pragma GCC unroll 4
  for (int s = 0; s < kStreams; ++s) sums[s] = hn::Zero(d);
  for (int64_t i = 0; i < quarter; i += kStep) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      const float* at = in + s * quarter + i;
      hwy::Prefetch(at + kAhead);
      hwy::Prefetch(at + kAhead + kLine);
#pragma GCC unroll 8
      for (int64_t v = 0; v < kStep; v += kLanes) sums[s] = hn::Add(sums[s], hn::Load(d, at + v));
    }
  }
  return SumOf(sums, kStreams);
}

void CopyCached(const float* HWY_RESTRICT in, float* HWY_RESTRICT out, int64_t n) {
  const D d;
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) hn::Store(hn::Load(d, in + i + v * kLanes), d, out + i + v * kLanes);
  }
}

void CopyStreaming(const float* HWY_RESTRICT in, float* HWY_RESTRICT out, int64_t n) {
  const D d;
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) hn::Stream(hn::Load(d, in + i + v * kLanes), d, out + i + v * kLanes);
  }
  hwy::FlushStream();
}

// The sums tend to summand / (1 − factor) = 1, so that no value becomes denormal or infinite.
float Multiply(int64_t rounds) {
  const D d;
  volatile float factor_value = 0.99999f, summand_value = 1e-5f;  // not known to the compiler
  const V factor = hn::Set(d, factor_value), summand = hn::Set(d, summand_value);
  V sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sums[i] = hn::Set(d, 0.5f + 0.1f * static_cast<float>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = hn::MulAdd(sums[i], factor, summand);
  }
  return SumOf(sums, kSums);
}

int64_t RoundFlops() { return 2 * kSums * kLanes; }

}  // namespace HWY_NAMESPACE
}  // namespace layerd::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd::bench {

HWY_EXPORT(Forward);
HWY_EXPORT(FourStreams);
HWY_EXPORT(CopyCached);
HWY_EXPORT(CopyStreaming);
HWY_EXPORT(Multiply);
HWY_EXPORT(RoundFlops);

// ActiveSimd() comes first, as for every kernel: it sets the targets that Highway chooses from.
float ReadForward(const float* in, int64_t n) { return ActiveSimd(), HWY_DYNAMIC_DISPATCH(Forward)(in, n); }
float ReadFourStreams(const float* in, int64_t n) { return ActiveSimd(), HWY_DYNAMIC_DISPATCH(FourStreams)(in, n); }
void Copy(const float* in, float* out, int64_t n) { ActiveSimd(), HWY_DYNAMIC_DISPATCH(CopyCached)(in, out, n); }
void CopyNonTemporal(const float* in, float* out, int64_t n) {
  ActiveSimd(), HWY_DYNAMIC_DISPATCH(CopyStreaming)(in, out, n);
}
float MultiplyAdd(int64_t rounds) { return ActiveSimd(), HWY_DYNAMIC_DISPATCH(Multiply)(rounds); }
int64_t FlopsOfRound() { return ActiveSimd(), HWY_DYNAMIC_DISPATCH(RoundFlops)(); }

}  // namespace layerd::bench
#endif  // HWY_ONCE
