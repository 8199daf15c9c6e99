#include "lib/kernels/simd.h"

#include <atomic>

#include "hwy/highway.h"

namespace layerd {
namespace {

// The Highway targets that kernels may use under `simd`. None means Highway's baseline target, where kernels run their
// scalar twin.
int64_t HighwayTargets(Simd simd) {
#if HWY_ARCH_X86
  switch (simd) {
    case Simd::kScalar:
      return 0;
    case Simd::kAvx2:
      return HWY_AVX2;
    case Simd::kAvx512:
      return HWY_AVX3 | HWY_AVX2;
  }
#endif
  return 0;
}

bool IsSupported(Simd simd) {
  const int64_t targets = HighwayTargets(simd);
  return simd == Simd::kScalar || (targets != 0 && (hwy::SupportedTargets() & targets) == targets);
}

// Highway dispatches by a process-wide atomic mask that is empty until a kernel is first called, or until it is set
// here. Kernels ask ActiveSimd() before they dispatch, so Highway never fills it by itself, and both always agree.
std::atomic<Simd>& Active() {
  static std::atomic<Simd> active = [] {
    const Simd widest = SupportedSimd().back();
    hwy::GetChosenTarget().Update(HighwayTargets(widest));
    return widest;
  }();
  return active;
}

}  // namespace

std::string_view Name(Simd simd) {
  switch (simd) {
    case Simd::kScalar:
      return "scalar";
    case Simd::kAvx2:
      return "avx2";
    case Simd::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::optional<Simd> ParseSimd(std::string_view name) {
  for (const Simd simd : {Simd::kScalar, Simd::kAvx2, Simd::kAvx512}) {
    if (name == Name(simd)) return simd;
  }
  return std::nullopt;
}

std::vector<Simd> SupportedSimd() {
  std::vector<Simd> supported;
  for (const Simd simd : {Simd::kScalar, Simd::kAvx2, Simd::kAvx512}) {
    if (IsSupported(simd)) supported.push_back(simd);
  }
  return supported;
}

Simd ActiveSimd() { return Active().load(std::memory_order_relaxed); }

bool SetSimd(Simd simd) {
  if (!IsSupported(simd)) return false;
  Active().store(simd, std::memory_order_relaxed);
  hwy::GetChosenTarget().Update(HighwayTargets(simd));
  return true;
}

}  // namespace layerd
