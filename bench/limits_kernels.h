// What the limits of a machine are measured with: reading, copying and multiplying as fast as one thread can.
//
// They run on the SIMD target that the kernels of lib/kernels run on (lib/kernels/simd.h). Threads: pure functions.
#ifndef LAYERD_BENCH_LIMITS_KERNELS_H_
#define LAYERD_BENCH_LIMITS_KERNELS_H_

#include <cstdint>

namespace layerd::bench {

// Lengths here are multiples of this, and arrays are aligned to a cache line.
inline constexpr int64_t kLimitFloats = 512;

// The sum of in[0 … n − 1], read from one end to the other.
float ReadForward(const float* in, int64_t n);
// The same, as four streams at once with software prefetch; on some machines the faster way.
float ReadFourStreams(const float* in, int64_t n);

// out[i] = in[i], through the caches.
void Copy(const float* in, float* out, int64_t n);
// The same with stores that bypass the caches.
void CopyNonTemporal(const float* in, float* out, int64_t n);

// `rounds` of fused multiply-adds on independent sums in registers; a value that depends on all of them.
float MultiplyAdd(int64_t rounds);
// Floating-point operations of one round: 2 for each multiply-add.
int64_t FlopsOfRound();

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_LIMITS_KERNELS_H_
