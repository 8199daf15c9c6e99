// N4's bound on the error of products, on the weights and activations of trained models, for every dtype that their
// weights may have.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/kernels/matmul.h"
#include "lib/weights/safetensors.h"
#include "tests/golden/golden_files.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/product_testing.h"

namespace layerd {
namespace {

class ProductErrorOnRealWeights : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(InitMatMul(true).ok()); }

  // x · w in every dtype, as w came and packed, of all the rows and of the first.
  void Check(const std::vector<float>& x, const Tensor& w, const std::string& name) {
    const int64_t out = w.dim(0), in = w.dim(1), all = static_cast<int64_t>(x.size()) / in;
    ASSERT_EQ(static_cast<int64_t>(x.size()), all * in) << name;
    for (const DType dtype : kWeightDTypes) {
      TestMatrix matrix(dtype, WeightLayout::kOutIn, in, out);
      matrix.Fill([&](int64_t n, int64_t k) { return w.At(n * in + k); });
      const Panels panels = PanelsOf(matrix.View());
      for (const int64_t rows : {int64_t{1}, all}) {
        const std::vector<float> some(x.begin(), x.begin() + rows * in);
        std::vector<float> came(rows * out);
        MatMul(arena_, some.data(), rows, matrix.View(), nullptr, came.data());
        const double share = ShareOfErrorBound(some, came, rows, matrix);
        EXPECT_LE(share, 1) << name << " " << matrix.Name();
        EXPECT_TRUE(SameBits(MultiplyPacked(arena_, some, rows, panels), came, out)) << name << " " << matrix.Name();
        worst_ = std::max(worst_, share);
        ++checked_;
      }
    }
  }

  const Arena arena_{2};
  int checked_ = 0;
  double worst_ = 0;
};

TEST_F(ProductErrorOnRealWeights, Stories260K) {
  LAYERD_GOLDEN_OR_SKIP(activations_path, "data/stories260k/activations.safetensors");
  const auto activations = SafetensorsFile::Open(activations_path);
  ASSERT_TRUE(activations.ok()) << activations.status();
  for (const std::string kind : {"f32", "bf16"}) {
    LAYERD_GOLDEN_OR_SKIP(weights_path, absl::StrCat("data/stories260k/stories260k.", kind, ".safetensors"));
    const auto weights = SafetensorsFile::Open(weights_path);
    ASSERT_TRUE(weights.ok()) << weights.status();
    for (int i = 0; i < 5; ++i) {
      const std::vector<float> x = activations->Read(absl::StrCat("layers.", i, ".mlp.in"))->ToFloats();
      const std::vector<double> hidden =
          *activations->ReadDoubles(absl::StrCat("layers.", i, ".mlp.hidden_from_block"));
      const auto weight = [&](const char* which) {
        return *weights->Read(absl::StrCat("model.layers.", i, ".mlp.", which, "_proj.weight"));
      };
      Check(x, weight("gate"), absl::StrCat(kind, " gate ", i));
      Check(x, weight("up"), absl::StrCat(kind, " up ", i));
      Check({hidden.begin(), hidden.end()}, weight("down"), absl::StrCat(kind, " down ", i));
    }
  }
  EXPECT_EQ(checked_, 2 * 5 * 3 * 4 * 2);
  RecordProperty("worst_share_of_the_bound", std::to_string(worst_));
}

TEST_F(ProductErrorOnRealWeights, KeywordTransformer) {
  LAYERD_GOLDEN_OR_SKIP(weights_path, "data/kwt1/kwt1_ffn_norm.f32.safetensors");
  LAYERD_GOLDEN_OR_SKIP(activations_path, "data/kwt1/activations.safetensors");
  const auto weights = SafetensorsFile::Open(weights_path);
  const auto activations = SafetensorsFile::Open(activations_path);
  ASSERT_TRUE(weights.ok() && activations.ok()) << weights.status() << activations.status();
  for (const std::string word : {"yes", "stop"}) {
    for (const int i : {0, 5, 11}) {
      Check(activations->Read(absl::StrCat(word, ".layers.", i, ".fc.in"))->ToFloats(),
            *weights->Read(absl::StrCat("layers.", i, ".fc1.weight")), absl::StrCat(word, " fc1 ", i));
    }
  }
  EXPECT_EQ(checked_, 2 * 3 * 4 * 2);
}

}  // namespace
}  // namespace layerd
