// N4's bound on the error against the exact product, for every dtype of the weights, packed and as they came, on random
// and on adversarial data.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "lib/kernels/openblas.h"
#include "lib/kernels/product.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/product_testing.h"

namespace layerd {
namespace {

// What fills x and w: value(m or n, k).
struct Data {
  const char* name;
  std::function<float(std::mt19937&, int64_t k)> x, w;
  bool in_float16;  // whether weights of such magnitudes are within its range, in which int8's scales are too
};

float Normal(std::mt19937& random) { return std::normal_distribution<float>()(random); }

// Magnitudes over 2^range, around 1.
float Spread(std::mt19937& random, int range) {
  return std::ldexp(Normal(random), static_cast<int>(random() % range) - range / 2);
}

const Data kData[] = {
    {"random", [](auto& random, int64_t) { return Normal(random); },
     [](auto& random, int64_t) { return Normal(random); }, true},
    {"cancelling: large terms that cancel, among small ones",
     [](auto& random, int64_t k) { return k % 3 == 0   ? Normal(random)
                                          : k % 3 == 1 ? 1e8f
                                                       : -1e8f; },
     [](auto&, int64_t) { return 1.0f; }, true},
    {"cancelling in x and w",
     [](auto& random, int64_t k) { return (k % 2 == 0 ? 1e6f : -1e6f) * (1 + 1e-6f * Normal(random)); },
     [](auto& random, int64_t) { return 1 + 0.001f * Normal(random); }, true},
    {"ranges of 2^130, with products down to nothing and none that overflows in a sum",
     [](auto& random, int64_t) { return Spread(random, 120); },
     [](auto& random, int64_t) { return Spread(random, 120); }, false},
    {"ranges of float16", [](auto& random, int64_t) { return Spread(random, 200); },
     [](auto& random, int64_t) { return Spread(random, 26); }, true},
    {"denormal products, none of which may be lost to a flush",
     [](auto& random, int64_t) { return std::ldexp(Normal(random), -72); },
     [](auto& random, int64_t) { return std::ldexp(Normal(random), -72); }, false},
    {"denormal x", [](auto& random, int64_t) { return std::ldexp(Normal(random), -138); },
     [](auto& random, int64_t) { return Normal(random); }, true},
    {"denormal weights", [](auto& random, int64_t) { return std::ldexp(Normal(random), 20); },
     [](auto& random, int64_t) { return std::ldexp(Normal(random), -138); }, false},
    {"weights that are denormal in float16", [](auto& random, int64_t) { return Normal(random); },
     [](auto& random, int64_t) { return std::ldexp(Normal(random), -18); }, true},
    {"rounded away: a term of 1 and then terms of half its unit",
     [](auto&, int64_t k) { return k % 256 == 0 ? 1.0f : 0x1p-24f; }, [](auto&, int64_t) { return 1.0f; }, true},
};

TEST(ProductErrorTest, IsWithinTheBoundOnRandomAndAdversarialData) {
  ASSERT_TRUE(InitMatMul(true).ok());
  const Arena arena(2);
  constexpr int64_t kOut = 12;
  uint32_t seed = 0;
  double worst = 0;
  for (const Data& data : kData) {
    for (const int64_t in : {1, 100, 256, 257, 1000, 4096}) {
      if (kSanitized && in > 257) continue;
      for (const DType dtype : kWeightDTypes) {
        if ((dtype == DType::kFloat16 || dtype == DType::kInt8) && !data.in_float16) continue;
        TestMatrix matrix(dtype, WeightLayout::kOutIn, in, kOut);
        std::mt19937 random(++seed);
        matrix.Fill([&](int64_t, int64_t k) { return data.w(random, k); });
        const Panels panels = PanelsOf(matrix.View());
        for (const int64_t rows : {3, 256}) {  // by our own kernel, and of float32 by OpenBLAS where it is used
          if (rows > 3 && (kSanitized || dtype != DType::kFloat32 || in > 1000)) continue;
          std::vector<float> x(rows * in), came(rows * kOut);
          for (int64_t i = 0; i < rows * in; ++i) x[i] = data.x(random, i % in);
          MatMul(arena, x.data(), rows, matrix.View(), nullptr, came.data());
          const std::vector<float> packed = MultiplyPacked(arena, x, rows, panels);
          const double share = ShareOfErrorBound(x, came, rows, matrix);
          EXPECT_LE(share, 1) << rows << " x " << matrix.Name() << ", " << data.name;
          EXPECT_TRUE(SameBits(packed, came, kOut)) << rows << " x " << matrix.Name() << ", " << data.name;
          worst = std::max(worst, share);
        }
      }
    }
  }
  RecordProperty("worst_share_of_the_bound", std::to_string(worst));
  EXPECT_GT(worst, 0.01) << "data that comes nowhere near the bound says nothing of it";
}

}  // namespace
}  // namespace layerd
