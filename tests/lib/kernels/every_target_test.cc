// N2 says that all SIMD targets give the same bits, and many tests compare them. Here it is seen that the targets that
// they compare are all that this CPU has, and that what is said to run does.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lib/kernels/activation.h"
#include "lib/kernels/convert.h"
#include "lib/kernels/normalize_rows.h"
#include "lib/kernels/product.h"
#include "lib/kernels/simd.h"
#include "tests/lib/kernels/executed_instructions.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/product_testing.h"

#if defined(__x86_64__) && defined(__linux__)

namespace layerd {
namespace {

bool Supports(Simd simd) {
  const std::vector<Simd> supported = SupportedSimd();
  return std::find(supported.begin(), supported.end(), simd) != supported.end();
}

// By the compiler's own reading of CPUID and of what the operating system saves.
bool CpuHasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
}
bool CpuHasAvx512() {
  return CpuHasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

TEST(EveryTargetTest, WhatTheCpuHasIsSupported) {
  EXPECT_EQ(Supports(Simd::kAvx2), CpuHasAvx2());
  EXPECT_EQ(Supports(Simd::kAvx512), CpuHasAvx512());
  EXPECT_TRUE(Supports(Simd::kScalar));
}

// Calls of every kernel there is, small ones: they are stepped through.
std::map<std::string, std::function<void()>> Kernels() {
  std::map<std::string, std::function<void()>> kernels;
  const auto add_product = [&](const std::string& name, const TestMatrix& matrix, bool packed, int64_t rows) {
    struct Call {
      TestMatrix matrix;
      Panels panels;
      std::vector<float> x;
    };
    const auto call = std::make_shared<Call>(
        Call{matrix, packed ? PanelsOf(matrix.View()) : Panels(), NormalFloats(2, rows * matrix.in())});
    kernels[name] = [call, packed, rows, arena = std::make_shared<Arena>(1)] {
      const RowBlocks x(call->x.data(), rows, call->matrix.in(), kGroupRows);
      const Factor factor = {.panels = packed ? &call->panels : nullptr, .view = call->matrix.View()};
      Product(*arena, x, factor, nullptr, [](const ProductTile&) {});
    };
  };
  for (const DType dtype : kWeightDTypes) {
    TestMatrix matrix(dtype, WeightLayout::kOutIn, 8, 32);
    matrix.FillNormal(1);
    add_product("product of packed " + std::string(Name(dtype)), matrix, true, 3);
    add_product("product of one row and packed " + std::string(Name(dtype)), matrix, true, 1);
  }
  for (const WeightLayout layout : LayoutsOf(DType::kBFloat16)) {
    TestMatrix matrix(DType::kBFloat16, layout, 8, 32);
    matrix.FillNormal(1);
    add_product(layout == WeightLayout::kOutIn ? "product of [out, in]" : "product of [in, out]", matrix, false, 3);
  }
  static const std::vector<float> in = NormalFloats(3, 64);
  static std::vector<float> out(64);
  static std::vector<std::byte> narrow(64 * 2);
  for (const Activation kind : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu}) {
    kernels["gating " + std::to_string(static_cast<int>(kind))] = [kind] {
      ApplyGating({.activation = {kind}}, in.data(), in.data(), out.data(), 64);
    };
  }
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    kernels["norm " + std::to_string(static_cast<int>(kind))] = [kind] {
      NormalizeRows({.kind = kind,
                     .epsilon = 1e-6,
                     .dim = 64,
                     .group_size = 64,
                     .input_dtype = DType::kFloat32,
                     .output_dtype = DType::kFloat32,
                     .input = reinterpret_cast<const std::byte*>(in.data()),
                     .output = reinterpret_cast<std::byte*>(out.data())},
                    0, 1);
    };
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    kernels["narrowing to " + std::string(Name(dtype))] = [dtype] {
      NarrowFromFloat(dtype, in.data(), narrow.data(), 64);
    };
    kernels["widening of " + std::string(Name(dtype))] = [dtype] {
      WidenToFloat(dtype, narrow.data(), out.data(), 64);
    };
  }
  return kernels;
}

TEST(EveryTargetTest, EveryKernelRunsTheCodeOfTheTargetThatIsForced) {
  if (kSanitized) GTEST_SKIP() << "sanitizers have a say in signals; the same code is seen without them";
  for (const auto& [name, kernel] : Kernels()) {
    SCOPED_TRACE(name);
    std::map<Simd, ExecutedInstructions> executed;
    ForEachSimd([&, &call = kernel](Simd simd) {
      call();  // what is done once is done
      executed[simd] = Execute(call);
      EXPECT_GT(executed[simd].count, 20) << "nothing was seen";
    });
    // The twin of the products is compiled for AVX2 as well: its code is another one.
    const ExecutedInstructions& twin = executed[Simd::kScalar];
    EXPECT_EQ(twin.on_512_bits.size(), 0u);
    if (CpuHasAvx2()) {
      const ExecutedInstructions& avx2 = executed[Simd::kAvx2];
      EXPECT_GT(avx2.on_256_bits.size(), 0u);
      EXPECT_EQ(avx2.on_512_bits.size(), 0u);
      for (const uintptr_t address : avx2.on_256_bits) EXPECT_EQ(twin.on_256_bits.count(address), 0u);
    }
    if (CpuHasAvx512()) {
      EXPECT_GT(executed[Simd::kAvx512].on_512_bits.size(), 0u);
    }
  }
}

}  // namespace
}  // namespace layerd

#endif  // defined(__x86_64__) && defined(__linux__)
