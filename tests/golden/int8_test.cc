// The feed-forward layers of a trained model, quantised: every weight within the quantiser's bound, and the outputs on the
// model's own activations about as far from the trained ones as the quantised layer says, to the same bits on every SIMD
// target.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/layers/quantize.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/layer_hash.h"
#include "lib/weights/safetensors.h"
#include "tests/golden/golden_files.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {
namespace {

TEST(Int8StoriesTest, RealLayersKeepTheBoundAndTheErrorThatTheyTell) {
  LAYERD_GOLDEN_OR_SKIP(weights_path, "data/stories260k/stories260k.f32.safetensors");
  LAYERD_GOLDEN_OR_SKIP(activations_path, "data/stories260k/activations.safetensors");
  const auto checkpoint = Checkpoint::Open(weights_path, "stories260k");
  const auto activations = SafetensorsFile::Open(activations_path);
  ASSERT_TRUE(checkpoint.ok() && activations.ok()) << checkpoint.status() << activations.status();
  const Arena arena(2);
  for (int i = 0; i < 5; ++i) {
    const auto read = (*checkpoint->Find(absl::StrCat("model.layers.", i, ".mlp")))->Read();
    ASSERT_TRUE(read.ok()) << read.status();
    const auto& layer = std::get<FeedForwardLayer>(*read);
    const auto made = Quantize(arena, layer, ContentHash(*read), {});
    ASSERT_TRUE(made.ok()) << made.status();
    ASSERT_TRUE(CheckLayer(*made).ok()) << CheckLayer(*made).status();
    for (const auto& [role, matrix, scale] : kFeedForwardMatrices) {
      if (!(layer.weights.*matrix)) continue;
      const Tensor& from = *(layer.weights.*matrix);
      const auto one = QuantizeMatrix(arena, std::string(role), from, WeightLayout::kOutIn);
      ASSERT_TRUE(one.ok()) << one.status();
      ExpectBound(from.ToFloats(), from.dim(1), *one);
    }

    const Tensor input = *activations->Read(absl::StrCat("layers.", i, ".mlp.in"));
    const std::vector<double> expected = *activations->ReadDoubles(absl::StrCat("layers.", i, ".mlp.out"));
    std::optional<Tensor> first;
    ForEachSimd([&](Simd) {
      const auto fed = FeedForward(arena, made->spec, made->weights, input, std::nullopt, false);
      ASSERT_TRUE(fed.ok()) << fed.status();
      if (!first) first = fed->output;
      EXPECT_TRUE(SameBits(fed->output, *first)) << i;
    });
    double error = 0, of = 0;
    ASSERT_EQ(static_cast<int64_t>(expected.size()), first->num_elements());
    for (size_t j = 0; j < expected.size(); ++j) {
      error += std::pow(first->At(static_cast<int64_t>(j)) - expected[j], 2);
      of += expected[j] * expected[j];
    }
    const double relative = std::sqrt(error / of);
    EXPECT_LT(relative, 2 * *made->quantization->output_relative_rms_error) << i;
    EXPECT_GT(relative, *made->quantization->output_relative_rms_error / 4) << i;
    EXPECT_LT(*made->quantization->output_relative_rms_error, 0.02) << i;
  }
}

}  // namespace
}  // namespace layerd
