#include "lib/layers/packed_feed_forward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/base/errors.h"
#include "lib/layers/layer.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/layers/layer_testing.h"

namespace layerd {
namespace {

constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 1}, {33, 31}, {45, 70}, {64, 128}, {257, 300}};

// Calls check(spec, weights) for every form, orientation and dtype, of some sizes.
template <typename Check>
void ForEachWeights(const Check& check) {
  for (const auto& [dim, hidden_dim] : kSizes) {
    if (kSanitized && dim > 40) break;
    for (const LayerForm& form : LayerForms()) {
      for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
        for (const WeightKind& kind : WeightKinds(layout)) {
          LayerForm of_layout = form;
          of_layout.spec.layout = layout;
          SCOPED_TRACE(testing::Message() << form.name << ", " << kind.name << ", " << dim << " -> " << hidden_dim
                                          << (layout == WeightLayout::kInOut ? " [in, out]" : " [out, in]"));
          check(of_layout.spec, MakeWeights(of_layout, kind, dim, hidden_dim));
        }
      }
    }
  }
}

void ExpectSamePanels(const Panels& got, const Panels& want, const char* name) {
  ASSERT_EQ(got.empty(), want.empty()) << name;
  if (want.empty()) return;
  EXPECT_EQ(got.dtype(), want.dtype()) << name;
  EXPECT_EQ(got.in(), want.in()) << name;
  EXPECT_EQ(got.out(), want.out()) << name;
  ASSERT_EQ(got.num_bytes(), want.num_bytes()) << name;
  EXPECT_EQ(std::memcmp(got.panel(0), want.panel(0), got.num_bytes()), 0) << name;
}

void ExpectSameFloats(const float* got, const float* want, int64_t count, const char* name) {
  ASSERT_EQ(got == nullptr, want == nullptr) << name;
  if (want != nullptr) {
    EXPECT_EQ(std::memcmp(got, want, count * sizeof(float)), 0) << name;
  }
}

void ExpectSameContent(const PackedFeedForward& got, const PackedFeedForward& want) {
  ExpectSamePanels(got.gate(), want.gate(), "gate");
  ExpectSamePanels(got.up(), want.up(), "up");
  ExpectSamePanels(got.down(), want.down(), "down");
  const FeedForwardExtent& extent = want.extent();
  ExpectSameFloats(got.gate_bias(), want.gate_bias(), extent.hidden_dim, "gate_bias");
  ExpectSameFloats(got.up_bias(), want.up_bias(), extent.hidden_dim, "up_bias");
  ExpectSameFloats(got.down_bias(), want.down_bias(), extent.out_dim, "down_bias");
  ExpectSameFloats(got.inner_norm_gamma(), want.inner_norm_gamma(), extent.hidden_dim, "inner_norm_gamma");
}

void ExpectSameWeights(const FeedForwardWeights& got, const FeedForwardWeights& want) {
  for (const auto& [role, member] : kFeedForwardRoles) {
    ASSERT_EQ((got.*member).has_value(), (want.*member).has_value()) << role;
    if (want.*member) {
      EXPECT_TRUE(SameBits(*(got.*member), *(want.*member))) << role;
    }
  }
}

// Every weight with any bits, of the same shapes and dtypes.
FeedForwardWeights AnyBits(const FeedForwardWeights& weights, uint32_t seed) {
  std::mt19937 random(seed);
  FeedForwardWeights any;
  for (const auto& [role, member] : kFeedForwardRoles) {
    if (!(weights.*member)) continue;
    Tensor tensor = Tensor::Allocate((weights.*member)->dtype(), (weights.*member)->shape());
    for (size_t i = 0; i < tensor.num_bytes(); ++i) tensor.mutable_data()[i] = static_cast<std::byte>(random());
    any.*member = tensor;
  }
  return any;
}

TEST(PackedFeedForwardTest, GivesTheBitsOfTheWeightsAsTheyCame) {
  ASSERT_TRUE(InitMatMul(true).ok());
  const Arena arena(2);
  ForEachWeights([&](const FeedForwardSpec& spec, const FeedForwardWeights& weights) {
    const PackedFeedForward packed = PackedFeedForward::Of(arena, spec, weights);
    for (const int64_t rows : {0, 1, 5, 70}) {
      const DType dtype = rows == 5 ? DType::kFloat16 : DType::kFloat32;
      const Tensor input = SeededInput(2, dtype, {rows, packed.extent().dim});
      const auto output_dtype = rows == 70 ? std::optional(DType::kBFloat16) : std::nullopt;
      const auto got = FeedForward(arena, packed, input, output_dtype, true);
      const auto want = FeedForward(arena, spec, weights, input, output_dtype, true);
      ASSERT_TRUE(got.ok() && want.ok()) << got.status() << want.status();
      EXPECT_TRUE(SameBits(got->output, want->output)) << rows;
      for (const auto member : {&FeedForwardOutputs::gate, &FeedForwardOutputs::up, &FeedForwardOutputs::hidden,
                                &FeedForwardOutputs::normed}) {
        ASSERT_EQ(((*got).*member).has_value(), ((*want).*member).has_value());
        if ((*want).*member) {
          EXPECT_TRUE(SameBits(*((*got).*member), *((*want).*member))) << rows;
        }
      }
    }
  });
}

TEST(PackedFeedForwardTest, UnpackedGivesEveryBitBack) {
  const Arena arena(2);
  uint32_t seed = 0;
  ForEachWeights([&](const FeedForwardSpec& spec, const FeedForwardWeights& like) {
    const FeedForwardWeights weights = AnyBits(like, ++seed);
    const PackedFeedForward packed = PackedFeedForward::Of(arena, spec, weights);
    ExpectSameWeights(packed.Unpacked(), weights);
    for (const auto& [role, member] : kFeedForwardRoles) {
      if (!(weights.*member)) continue;
      const Tensor& outline = *(packed.outline().*member);
      EXPECT_EQ(outline.dtype(), (weights.*member)->dtype()) << role;
      EXPECT_EQ(outline.shape(), (weights.*member)->shape()) << role;
      EXPECT_EQ(outline.data() == nullptr, outline.rank() != 1) << role;
    }
  });
}

// A run of rows of a weight.
struct RowRun {
  std::string_view role;
  int64_t first, rows;
  const std::byte* bytes;
  size_t num_bytes;
};

void PutAll(PackedFeedForward& packed, const std::vector<RowRun>& runs, size_t begin, size_t every) {
  for (size_t i = begin; i < runs.size(); i += every) {
    packed.Put(runs[i].role, runs[i].first, runs[i].rows, runs[i].bytes);
  }
}

// All rows of all weights in runs, of lengths up to `longest` that are multiples of `unit`, but for the last of a
// weight, in any order.
std::vector<RowRun> RunsOf(const FeedForwardWeights& weights, int64_t unit, int64_t longest, std::mt19937& random) {
  std::vector<RowRun> runs;
  for (const auto& [role, member] : kFeedForwardRoles) {
    if (!(weights.*member)) continue;
    const Tensor& tensor = *(weights.*member);
    const int64_t rows = tensor.dim(0), row_bytes = static_cast<int64_t>(tensor.num_bytes()) / rows;
    for (int64_t first = 0; first < rows;) {
      const int64_t units = 1 + static_cast<int64_t>(random()) % (longest / unit);
      const int64_t count = std::min(rows - first, units * unit);
      runs.push_back({role, first, count, tensor.data() + first * row_bytes, static_cast<size_t>(count * row_bytes)});
      first += count;
    }
  }
  std::shuffle(runs.begin(), runs.end(), random);
  return runs;
}

TEST(PackedFeedForwardTest, RunsOfAnyLengthInAnyOrderGiveTheSameLayerAndComeBackOutOfIt) {
  const Arena arena(1);
  std::mt19937 random(1);
  ForEachWeights([&](const FeedForwardSpec& spec, const FeedForwardWeights& like) {
    const FeedForwardWeights weights = AnyBits(like, random());
    FeedForwardLayer layer{spec, weights};
    const FeedForwardWeights outline = std::get<FeedForwardLayer>(OutlineOf(layer)).weights;
    const PackedFeedForward whole = PackedFeedForward::Of(arena, spec, weights);
    for (const int64_t longest : {1, 7, 100}) {
      PackedFeedForward packed(spec, outline);
      PutAll(packed, RunsOf(weights, 1, longest, random), 0, 1);
      ExpectSameContent(packed, whole);
      ExpectSameWeights(packed.Unpacked(), weights);
      for (const RowRun& run : RunsOf(weights, 1, longest, random)) {
        std::vector<std::byte> bytes(run.num_bytes + 1, std::byte{0x5A});
        packed.Get(run.role, run.first, run.rows, bytes.data());
        ASSERT_EQ(std::memcmp(bytes.data(), run.bytes, run.num_bytes), 0) << run.role << " " << run.first;
        ASSERT_EQ(bytes.back(), std::byte{0x5A});
      }
    }
  });
}

TEST(PackedFeedForwardTest, ThreadsMayPutDifferentRunsAtTheSameTime) {
  std::mt19937 random(2);
  const LayerForm interleaved = LayerForms()[2], separate = LayerForms()[3];
  for (const LayerForm& form : {interleaved, separate}) {
    for (const WeightKind& kind : WeightKinds(WeightLayout::kOutIn)) {
      SCOPED_TRACE(form.name + " " + kind.name);
      const FeedForwardWeights weights = AnyBits(MakeWeights(form, kind, 100, 500), random());
      PackedFeedForward packed(form.spec, weights);
      const std::vector<RowRun> runs = RunsOf(weights, 64, 128, random);
      std::thread other([&] { PutAll(packed, runs, 1, 2); });
      PutAll(packed, runs, 0, 2);
      other.join();
      ExpectSameContent(packed, PackedFeedForward::Of(Arena(3), form.spec, weights));
    }
  }
}

TEST(PackedFeedForwardTest, PacksTheSameOnAnyNumberOfThreads) {
  const LayerForm form = LayerForms()[1];
  const FeedForwardWeights weights = MakeWeights(form, WeightKinds(WeightLayout::kOutIn)[2], 700, 900);
  const PackedFeedForward one = PackedFeedForward::Of(Arena(1), form.spec, weights);
  ExpectSameContent(PackedFeedForward::Of(Arena(5), form.spec, weights), one);
}

TEST(PackedFeedForwardTest, TellsItsBytes) {
  ForEachWeights([](const FeedForwardSpec& spec, const FeedForwardWeights& weights) {
    const PackedFeedForward packed(spec, weights);
    int64_t bytes = packed.up().num_bytes() + packed.down().num_bytes();
    if (!packed.gate().empty()) bytes += packed.gate().num_bytes();
    for (const auto& [role, member] : kFeedForwardRoles) {
      // Vectors are kept as they came and widened.
      if (!(weights.*member) || (weights.*member)->rank() != 1) continue;
      bytes += static_cast<int64_t>((weights.*member)->num_bytes()) + 4 * (weights.*member)->num_elements();
    }
    EXPECT_EQ(PackedFeedForward::BytesOf(spec, weights), bytes);
  });
}

TEST(PackedFeedForwardTest, TakesAtMostTwoHundredthsMoreThanItsWeightsWhereSizesAreMultiplesOf64) {
  for (const LayerForm& form : LayerForms()) {
    for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
      for (const WeightKind& kind : WeightKinds(layout)) {
        LayerForm of_layout = form;
        of_layout.spec.layout = layout;
        FeedForwardLayer layer{of_layout.spec, MakeWeights(of_layout, kind, 256, 704)};
        const auto extent = CheckLayer(layer);
        ASSERT_TRUE(extent.ok()) << extent.status();
        EXPECT_LE(static_cast<double>(PackedFeedForward::BytesOf(layer.spec, layer.weights)),
                  1.02 * static_cast<double>(extent->weight_bytes))
            << form.name << " " << kind.name;
      }
    }
  }
}

TEST(PackedFeedForwardTest, RefusesInputThatDoesNotFitByField) {
  const Arena arena(1);
  const FeedForwardSpec spec = SwiGluSpec();
  const PackedFeedForward packed =
      PackedFeedForward::Of(arena, spec, SeededFeedForwardWeights(1, spec, DType::kBFloat16, 8, 12, false));
  const auto refused = [&](const Tensor& input, std::optional<DType> output_dtype = std::nullopt) {
    const absl::Status status = FeedForward(arena, packed, input, output_dtype, false).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return DetailsOf(status).field + " | " + std::string(status.message());
  };
  EXPECT_EQ(refused(Tensor::Allocate(DType::kFloat32, {2, 9})),
            "weights.gate.shape | weights.gate.shape: expected [h, d = 9] for layout OUT_IN, got [12, 8]");
  EXPECT_EQ(refused(Tensor::FromFloats(DType::kFloat32, {}, {1})).substr(0, 11), "input.shape");
  EXPECT_EQ(refused(Tensor::Allocate(DType::kFloat32, {2, 0})).substr(0, 11), "input.shape");
  EXPECT_EQ(refused(Tensor::Allocate(DType::kInt8, {2, 8})).substr(0, 11), "input.dtype");
  EXPECT_EQ(refused(Tensor::Allocate(DType::kFloat32, {2, 8}), DType::kInt8).substr(0, 12), "output_dtype");
}

TEST(PackedFeedForwardTest, IsGivenUpWhenNobodyWantsItAnyMore) {
  const Arena arena(1);
  const PackedFeedForward packed = PackedFeedForward::Of(
      arena, ReluSpec(), SeededFeedForwardWeights(6, ReluSpec(), DType::kFloat32, 1, 4096, false));
  int asked = 0;
  const auto outputs = FeedForward(arena, packed, SeededInput(6, DType::kFloat32, {9000, 1}), std::nullopt, false,
                                   [&] { return ++asked < 2 ? absl::OkStatus() : CancelledWhileWaiting(); });
  EXPECT_EQ(outputs.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(asked, 2);
}

TEST(PackedFeedForwardTest, KeepsItsOutputOfInputsWithMoreAxes) {
  const Arena arena(1);
  const FeedForwardSpec spec = SwiGluSpec();
  const FeedForwardWeights weights = SeededFeedForwardWeights(1, spec, DType::kFloat32, 8, 12, false);
  const PackedFeedForward packed = PackedFeedForward::Of(arena, spec, weights);
  const Tensor input = SeededInput(1, DType::kFloat32, {2, 3, 8});
  const auto outputs = FeedForward(arena, packed, input, std::nullopt, true);
  ASSERT_TRUE(outputs.ok());
  EXPECT_EQ(outputs->output.shape(), (Shape{2, 3, 8}));
  EXPECT_EQ(outputs->hidden->shape(), (Shape{2, 3, 12}));
}

}  // namespace
}  // namespace layerd
