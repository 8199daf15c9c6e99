// Which instruction set the kernels run on: chosen once from the CPU, or forced.
//
// Every kernel gives the same bits on every target (docs/numerics.md, N2): AVX-512 and AVX2 by Highway, and a scalar
// twin of ours that uses std::fma. A CPU without AVX2 and FMA runs the scalar twin.
//
// Threads: SetSimd() before kernels run; the rest from any thread.
#ifndef LAYERD_LIB_KERNELS_SIMD_H_
#define LAYERD_LIB_KERNELS_SIMD_H_

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace layerd {

enum class Simd : uint8_t { kScalar, kAvx2, kAvx512 };

// "scalar", "avx2", "avx512".
std::string_view Name(Simd simd);
std::optional<Simd> ParseSimd(std::string_view name);

// What this CPU can run, scalar included, widest last.
std::vector<Simd> SupportedSimd();
// What kernels run on now: the widest supported one unless SetSimd() said otherwise.
Simd ActiveSimd();
// Forces `simd` for all kernels; false, and no change, where this CPU does not support it.
bool SetSimd(Simd simd);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_SIMD_H_
