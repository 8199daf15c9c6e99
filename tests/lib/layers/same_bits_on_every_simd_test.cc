// N2: whole layers give the same bits on AVX-512, on AVX2 and by the scalar twins, packed or not. That every target this
// CPU has is among them, and runs, is seen in every_target_test.cc.
#include <gtest/gtest.h>

#include <string>

#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/layers/layer_testing.h"

namespace layerd {
namespace {

void ExpectSame(const std::optional<Tensor>& got, const std::optional<Tensor>& want, const char* name) {
  ASSERT_EQ(got.has_value(), want.has_value()) << name;
  if (got) {
    EXPECT_TRUE(SameBits(*got, *want)) << name;
  }
}

void ExpectSame(const FeedForwardOutputs& got, const FeedForwardOutputs& want) {
  ExpectSame(got.gate, want.gate, "gate");
  ExpectSame(got.up, want.up, "up");
  ExpectSame(got.hidden, want.hidden, "hidden");
  ExpectSame(got.normed, want.normed, "normed");
  EXPECT_TRUE(SameBits(got.output, want.output)) << "output";
}

class SameBitsOnEverySimdTest : public ::testing::Test {
 protected:
  // OpenBLAS is among what runs on the widest target.
  static void SetUpTestSuite() { ASSERT_TRUE(InitMatMul(true).ok()); }

  static void Compare(int64_t dim, int64_t hidden_dim, std::initializer_list<int64_t> batches) {
    const Arena arena(2);
    ForEachLayer(dim, hidden_dim, [&](const std::string& name, const TestLayer& layer) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (const int64_t rows : batches) {
          const Tensor input = SeededInput(4, dtype, {rows, dim});
          FeedForwardOutputs twin;
          {
            const ForcedSimd forced(Simd::kScalar);
            twin = layer.Compute(arena, input, true);
          }
          ForEachSimd([&](Simd) { ExpectSame(layer.Compute(arena, input, true), twin); });
        }
      }
    });
  }
};

TEST_F(SameBitsOnEverySimdTest, EveryFormDTypeAndOrientationPackedOrNot) {
  if (kSanitized) {
    Compare(33, 40, {1, 7});
  } else {
    Compare(45, 70, {1, 2, 5, 6, 7, 13, 70});
  }
}

TEST_F(SameBitsOnEverySimdTest, WiderLayers) {
  if (kSanitized) GTEST_SKIP() << "the smaller ones run";
  Compare(258, 300, {1, 4, 9});
}

}  // namespace
}  // namespace layerd
