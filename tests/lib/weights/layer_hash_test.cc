#include "lib/weights/layer_hash.h"

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

absl::Span<const std::byte> BytesOf(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

TEST(Sha256, GivesThePublishedValues) {  // FIPS 180-4's examples
  EXPECT_EQ(Sha256Of({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Of(BytesOf("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Of(BytesOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 million;
  const std::string part(1000, 'a');
  for (int i = 0; i < 1000; ++i) million.Update(BytesOf(part));
  EXPECT_EQ(million.Finish(), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnThePieces) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i);
  for (const size_t size : {1, 7, 63, 64, 65, 300}) {
    Sha256 hash;
    for (size_t at = 0; at < text.size(); at += size) hash.Update(BytesOf(std::string_view(text).substr(at, size)));
    EXPECT_EQ(hash.Finish(), Sha256Of(BytesOf(text))) << size;
  }
}

TEST(Sha256, IsKnownByItsForm) {
  const std::string good = Sha256Of({});
  EXPECT_TRUE(IsSha256(good));
  EXPECT_FALSE(IsSha256(""));
  EXPECT_FALSE(IsSha256(good.substr(1)));
  EXPECT_FALSE(IsSha256(good + "0"));
  EXPECT_FALSE(IsSha256("E" + good.substr(1)));
  EXPECT_FALSE(IsSha256("g" + good.substr(1)));
  EXPECT_FALSE(IsSha256(std::string(1, '\0') + good.substr(1)));
}

NormalizeLayer Norm() {
  NormalizeLayer layer;
  layer.spec.rounding = NormRounding::kBeforeGamma;
  layer.weights.gamma = Tensor::FromFloats(DType::kFloat32, {2}, {1.0f, -2.0f});
  return layer;
}

std::string Text(const Layer& layer) {
  return CanonicalText(layer, [](std::string_view role) { return "<" + std::string(role) + ">"; });
}

// What these tests pin is a promise: callers compute the same text.
TEST(CanonicalText, OfANorm) {
  EXPECT_EQ(Text(Norm()),
            "layerd layer 1\n"
            "normalize kind=rms_norm epsilon=3eb0c6f7a0b5ed8d rounding=before_gamma gamma_offset=0000000000000000"
            " group_size=0 gate_position=none\n"
            "gamma F32 [2] <gamma>\n");
  NormalizeLayer layer = Norm();
  layer.spec = {.kind = NormKind::kLayerNorm,
                .epsilon = 0.0,
                .rounding = NormRounding::kAfterGamma,
                .gamma_offset = 1.0,
                .group_size = 2,
                .gate_position = GatePosition::kLast};
  layer.weights.beta = Tensor::WithoutData(DType::kBFloat16, {2});
  EXPECT_EQ(Text(layer),
            "layerd layer 1\n"
            "normalize kind=layer_norm epsilon=0000000000000000 rounding=after_gamma gamma_offset=3ff0000000000000"
            " group_size=2 gate_position=last\n"
            "gamma F32 [2] <gamma>\n"
            "beta BF16 [2] <beta>\n");
}

TEST(CanonicalText, OfAFeedForwardLayer) {
  FeedForwardLayer layer;
  layer.spec.activation = {Activation::kSilu, 1.702};
  layer.spec.packing = GateUpPacking::kInterleaved;
  layer.spec.gate_max = 7.0;
  layer.spec.up_limit = 7.0;
  layer.spec.up_offset = 1.0;
  layer.spec.inner_norm.emplace();
  layer.weights.down = Tensor::WithoutData(DType::kFloat16, {3, 4});
  layer.weights.gate_up = Tensor::WithoutData(DType::kBFloat16, {8, 3});
  EXPECT_EQ(Text(layer),
            "layerd layer 1\n"
            "feed_forward form=gated activation=silu swish_beta=3ffb3b645a1cac08 packing=interleaved layout=out_in"
            " gate_max=401c000000000000 up_limit=401c000000000000 up_offset=3ff0000000000000"
            " inner_norm=3eb0c6f7a0b5ed8d\n"
            "gate_up BF16 [8, 3] <gate_up>\n"
            "down F16 [3, 4] <down>\n");
}

TEST(CanonicalText, HasScalesBehindTheirMatricesAndNothingOfTheQuantization) {
  FeedForwardLayer layer;
  layer.spec = {.form = FeedForwardForm::kPlain, .activation = {Activation::kRelu}};
  layer.weights.up = Tensor::WithoutData(DType::kInt8, {4, 40});
  layer.weights.up_scale = Tensor::WithoutData(DType::kFloat16, {4, 2});
  layer.weights.up_bias = Tensor::WithoutData(DType::kFloat32, {4});
  layer.weights.down = Tensor::WithoutData(DType::kInt8, {40, 4});
  layer.weights.down_scale = Tensor::WithoutData(DType::kFloat16, {40, 1});
  const std::string text =
      "layerd layer 1\n"
      "feed_forward form=plain activation=relu swish_beta=3ff0000000000000 packing=separate layout=out_in"
      " gate_max=none up_limit=none up_offset=0000000000000000 inner_norm=none\n"
      "up I8 [4, 40] <up>\n"
      "up_scale F16 [4, 2] <up_scale>\n"
      "down I8 [40, 4] <down>\n"
      "down_scale F16 [40, 1] <down_scale>\n"
      "up_bias F32 [4] <up_bias>\n";
  EXPECT_EQ(Text(layer), text);
  layer.quantization.emplace();
  EXPECT_EQ(Text(layer), text);
}

TEST(ContentHash, IsTheSha256OfTheText) {
  const NormalizeLayer layer = Norm();
  const std::string data_hash = Sha256Of(layer.weights.gamma->bytes());
  const std::string text = CanonicalText(layer, [&](std::string_view) { return data_hash; });
  EXPECT_EQ(ContentHash(layer), Sha256Of(BytesOf(text)));
  EXPECT_EQ(ContentHash(layer), "f9630bf2d55edc2064e3d0898a53746c8df650709d7fc81cb5524647835706c8");
  EXPECT_EQ(ContentHash(OutlineOf(layer), {{"gamma", data_hash}}), ContentHash(layer));
}

TEST(ContentHash, TellsApartWhatComputesDifferently) {
  std::vector<Layer> layers;
  const auto norm = [&](auto change) {
    NormalizeLayer layer = Norm();
    change(layer);
    layers.emplace_back(std::move(layer));
  };
  norm([](NormalizeLayer&) {});
  norm([](NormalizeLayer& l) { l.spec.kind = NormKind::kLayerNorm; });
  norm([](NormalizeLayer& l) { l.spec.epsilon = 1e-5; });
  norm([](NormalizeLayer& l) { l.spec.rounding = NormRounding::kAfterGamma; });
  norm([](NormalizeLayer& l) { l.spec.gamma_offset = 1; });
  norm([](NormalizeLayer& l) { l.spec.gamma_offset = -0.0; });
  norm([](NormalizeLayer& l) { l.spec.group_size = 1; });
  norm([](NormalizeLayer& l) { l.spec.gate_position = GatePosition::kFirst; });
  norm([](NormalizeLayer& l) { l.weights.beta = l.weights.gamma; });
  norm([](NormalizeLayer& l) { l.weights.gamma = Tensor::FromFloats(DType::kFloat32, {2}, {1.0f, 2.0f}); });
  norm([](NormalizeLayer& l) { l.weights.gamma = Tensor::FromFloats(DType::kFloat32, {1}, {1.0f}); });
  norm([](NormalizeLayer& l) { l.weights.gamma = Tensor::FromFloats(DType::kFloat16, {2}, {1.0f, -2.0f}); });
  const auto feed_forward = [&](auto change) {
    FeedForwardLayer layer{SwiGluSpec(), SeededFeedForwardWeights(1, SwiGluSpec(), DType::kFloat32, 2, 2, false)};
    change(layer);
    layers.emplace_back(std::move(layer));
  };
  feed_forward([](FeedForwardLayer&) {});
  feed_forward([](FeedForwardLayer& l) { l.spec.form = FeedForwardForm::kPlain; });
  feed_forward([](FeedForwardLayer& l) { l.spec.activation.kind = Activation::kGelu; });
  feed_forward([](FeedForwardLayer& l) { l.spec.activation.beta = 2; });
  feed_forward([](FeedForwardLayer& l) { l.spec.packing = GateUpPacking::kHalves; });
  feed_forward([](FeedForwardLayer& l) { l.spec.layout = WeightLayout::kInOut; });
  feed_forward([](FeedForwardLayer& l) { l.spec.gate_max = 1; });
  feed_forward([](FeedForwardLayer& l) { l.spec.up_limit = 1; });
  feed_forward([](FeedForwardLayer& l) { l.spec.up_offset = 1; });
  feed_forward([](FeedForwardLayer& l) { l.spec.inner_norm.emplace(); });
  feed_forward([](FeedForwardLayer& l) { l.spec.inner_norm = InnerNorm{1e-5}; });
  feed_forward([](FeedForwardLayer& l) { std::swap(l.weights.gate, l.weights.up); });
  std::set<std::string> hashes;
  for (const Layer& layer : layers) hashes.insert(ContentHash(layer));
  EXPECT_EQ(hashes.size(), layers.size());
}

TEST(ContentHash, ADefaultIsTheSameAsItsValue) {
  NormalizeLayer norm = Norm();
  norm.spec.epsilon = 1e-6;
  EXPECT_EQ(ContentHash(norm), ContentHash(Norm()));
  FeedForwardLayer left_out{SwiGluSpec(), SeededFeedForwardWeights(1, SwiGluSpec(), DType::kFloat32, 2, 2, false)};
  left_out.spec.inner_norm.emplace();
  FeedForwardLayer given = left_out;
  given.spec.inner_norm->epsilon = kDefaultInnerNormEpsilon;
  EXPECT_EQ(ContentHash(given), ContentHash(left_out));
}

}  // namespace
}  // namespace layerd
