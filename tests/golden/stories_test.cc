// Every norm and feed-forward layer of a trained model on its own activations, by the layer library, on every SIMD target.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/safetensors.h"
#include "tests/golden/golden_files.h"
#include "tests/lib/kernels/kernel_testing.h"

namespace layerd {
namespace {

TEST(StoriesTest, NormsAreRoundedOnceAndFeedForwardsWithin3e6) {
  LAYERD_GOLDEN_OR_SKIP(weights_path, "data/stories260k/stories260k.f32.safetensors");
  LAYERD_GOLDEN_OR_SKIP(activations_path, "data/stories260k/activations.safetensors");
  const auto checkpoint = Checkpoint::Open(weights_path, "stories260k");
  const auto activations = SafetensorsFile::Open(activations_path);
  ASSERT_TRUE(checkpoint.ok() && activations.ok()) << checkpoint.status() << activations.status();
  const auto read = [&](const std::string& name) { return (*checkpoint->Find(name))->Read(); };
  const Arena arena(2);
  ForEachSimd([&](Simd) {
    for (int i = 0; i < 5; ++i) {
      const std::string layer = absl::StrCat("layers.", i, ".");
      const auto norm_layer = read(absl::StrCat("model.", layer, "post_attention_layernorm"));
      ASSERT_TRUE(norm_layer.ok()) << norm_layer.status();
      const auto& norm = std::get<NormalizeLayer>(*norm_layer);
      NormalizeInputs inputs;
      inputs.input = *activations->Read(layer + "ffn_block_in");
      inputs.gamma = norm.weights.gamma;
      const auto normed = Normalize(arena, norm.spec, inputs, std::nullopt, false);
      ASSERT_TRUE(normed.ok());
      const std::vector<double> norm_expected = *activations->ReadDoubles(layer + "post_attention_layernorm.out");
      ASSERT_EQ(static_cast<int64_t>(norm_expected.size()), normed->output.num_elements());
      for (size_t j = 0; j < norm_expected.size(); ++j) {
        EXPECT_LE(UlpError(DType::kFloat32, normed->output.At(static_cast<int64_t>(j)), norm_expected[j]), 0.501)
            << layer << j;
      }

      const auto mlp_layer = read(absl::StrCat("model.", layer, "mlp"));
      ASSERT_TRUE(mlp_layer.ok()) << mlp_layer.status();
      const auto& mlp = std::get<FeedForwardLayer>(*mlp_layer);
      const auto fed =
          FeedForward(arena, mlp.spec, mlp.weights, *activations->Read(layer + "mlp.in"), std::nullopt, false);
      ASSERT_TRUE(fed.ok()) << fed.status();
      const std::vector<double> expected = *activations->ReadDoubles(layer + "mlp.out");
      ASSERT_EQ(static_cast<int64_t>(expected.size()), fed->output.num_elements());
      for (size_t j = 0; j < expected.size(); ++j) {
        EXPECT_NEAR(fed->output.At(static_cast<int64_t>(j)), expected[j], 3e-6) << layer << j;
      }
    }
  });
}

}  // namespace
}  // namespace layerd
