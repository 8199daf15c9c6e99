// The Highway targets that kernels are compiled for. Include before hwy/foreach_target.h and hwy/highway.h.
//
// AVX2 and AVX-512 only: the SSE targets do not fuse multiply-add, so they cannot give the same bits; CPUs without AVX2
// run the scalar twins. Highway always compiles a baseline as well, and it dispatches to it where nothing better is
// allowed: there (LAYERD_BASELINE_TARGET) a kernel is only a call of its twin.
#ifndef LAYERD_LIB_KERNELS_HIGHWAY_TARGETS_H_
#define LAYERD_LIB_KERNELS_HIGHWAY_TARGETS_H_

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#endif

// Scalable vectors (SVE, RISC-V) cannot be kept in the arrays that the kernels use.
#define LAYERD_BASELINE_TARGET (HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE)

#endif  // LAYERD_LIB_KERNELS_HIGHWAY_TARGETS_H_
