// How layers get into memory, and out of it again: lib/resident/layer_preparation.h and layer_bytes.h.
#include "lib/resident/layer_preparation.h"

#include <fcntl.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "lib/layers/packed_feed_forward.h"
#include "lib/resident/layer_bytes.h"
#include "lib/resident/prepared_layers.h"
#include "tests/lib/resident/library_testing.h"
#include "tests/lib/resident/store_testing.h"

namespace layerd {
namespace {

constexpr int64_t kBudget = int64_t{1} << 30;

// Layers of every packing and layout, of sizes for which pieces of weights have one row, five, or two; or blocks of 64.
std::vector<FeedForwardLayer> Layers() {
  struct Case {
    GateUpPacking packing;
    WeightLayout layout;
    DType dtype;
    int64_t dim, hidden_dim;
    FeedForwardForm form = FeedForwardForm::kGated;
  };
  std::vector<FeedForwardLayer> layers;
  for (const Case& one :
       {Case{GateUpPacking::kSeparate, WeightLayout::kOutIn, DType::kFloat32, 50'000, 13},
        Case{GateUpPacking::kSeparate, WeightLayout::kInOut, DType::kFloat16, 11, 100'003},
        Case{GateUpPacking::kHalves, WeightLayout::kOutIn, DType::kBFloat16, 90'001, 37},
        Case{GateUpPacking::kHalves, WeightLayout::kInOut, DType::kFloat32, 7, 50'001},
        Case{GateUpPacking::kInterleaved, WeightLayout::kOutIn, DType::kFloat32, 300'000, 3},
        Case{GateUpPacking::kInterleaved, WeightLayout::kInOut, DType::kBFloat16, 5, 70'001},
        Case{GateUpPacking::kInterleaved, WeightLayout::kOutIn, DType::kFloat16, 512, 700},
        Case{GateUpPacking::kSeparate, WeightLayout::kOutIn, DType::kFloat32, 50'000, 7, FeedForwardForm::kPlain}}) {
    FeedForwardLayer layer;
    layer.spec.form = one.form;
    layer.spec.packing = one.packing;
    layer.spec.layout = one.layout;
    layer.spec.inner_norm = InnerNorm{};
    layer.weights =
        SeededFeedForwardWeights(layers.size(), layer.spec, one.dtype, one.dim, one.hidden_dim, /*biases=*/true);
    layers.push_back(std::move(layer));
  }
  return layers;
}

TEST(LayerPreparation, PackedLayersHaveTheBitsOfTheirWeightsWhateverThePieces) {
  for (const FeedForwardLayer& layer : Layers()) {
    const MemoryRecord record(kA, layer);
    for (const int threads : {1, 3}) {
      const Arena arena(threads);
      LayerMemory memory(kBudget);
      const auto prepared = PrepareLayer(record, arena, *memory.Take(PreparedBytes(record.info())));
      ASSERT_TRUE(prepared.ok()) << prepared.status();
      EXPECT_EQ((*prepared)->name, kA);
      EXPECT_EQ((*prepared)->content_hash, ContentHash(Layer(layer)));
      EXPECT_EQ((*prepared)->extent.weight_bytes, record.info().extent.weight_bytes);
      EXPECT_EQ((*prepared)->memory_bytes, PackedFeedForward::BytesOf(layer.spec, layer.weights));
      for (const auto& [role, weight] : WeightsOf((*prepared)->layer)) EXPECT_EQ(weight.data(), nullptr) << role;
      EXPECT_TRUE(SameBits(LayerOf(**prepared), Layer(layer)));
      const Tensor input = SeededInput(1, DType::kFloat32, {2, (*prepared)->extent.dim});
      const auto expected = FeedForward(arena, layer.spec, layer.weights, input, std::nullopt, false);
      const auto got = FeedForward(arena, *(*prepared)->packed, input, std::nullopt, false);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_TRUE(SameBits(got->output, expected->output));
    }
  }
}

TEST(LayerPreparation, ALayerTakesTheBytesOfItsPanelsAlone) {
  // Of dims that are multiples of 64, no more than its weights and each bias' second form.
  const auto layer = std::get<FeedForwardLayer>(SeededSwiGluLayer(1, 64, 192));
  const MemoryRecord record(kA, layer);
  EXPECT_EQ(PreparedBytes(record.info()), record.info().extent.weight_bytes);
  FeedForwardLayer with_biases = layer;
  with_biases.weights = SeededFeedForwardWeights(1, layer.spec, DType::kBFloat16, 128, 192, /*biases=*/true);
  const MemoryRecord biased(kA, with_biases);
  EXPECT_LE(static_cast<double>(PreparedBytes(biased.info())),
            1.02 * static_cast<double>(biased.info().extent.weight_bytes));
  // Others fill up their last panel, and that is counted.
  const MemoryRecord narrow(kA, SeededSwiGluLayer(1, 33, 1));
  EXPECT_EQ(PreparedBytes(narrow.info()), 4 * (2 * 32 * 33 + 64 * 1));
  const MemoryRecord norm(kA, Norm(1));
  EXPECT_EQ(PreparedBytes(norm.info()), kNormBytes);
}

TEST(LayerPreparation, TheClaimLastsAsLongAsTheWeights) {
  const MemoryRecord record(kA, SeededSwiGluLayer(1, 8, 12));
  const int64_t bytes = PreparedBytes(record.info());
  LayerMemory memory(kBudget);
  auto prepared = PrepareLayer(record, Arena(1), *memory.Take(bytes));
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  auto packed = (*prepared)->packed;
  prepared = absl::CancelledError();
  EXPECT_EQ(memory.used_bytes(), bytes);
  packed.reset();
  EXPECT_EQ(memory.used_bytes(), 0);
}

TEST(LayerPreparation, WhatFailsClaimsNothing) {
  for (const Layer& layer : {SeededSwiGluLayer(1, 1024, 577), Norm(1)}) {
    MemoryRecord record(kA, layer);
    LayerMemory memory(kBudget);
    const auto prepare = [&] { return PrepareLayer(record, Arena(2), *memory.Take(1)).status().code(); };
    record.before_finish = [] { return absl::DataLossError("changed"); };
    EXPECT_EQ(prepare(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(memory.used_bytes(), 0);
    record.before_piece = [](std::string_view, size_t, absl::Span<std::byte>) { return absl::AbortedError("shorter"); };
    EXPECT_EQ(prepare(), absl::StatusCode::kAborted);
    record.gone = true;
    EXPECT_EQ(prepare(), absl::StatusCode::kNotFound);
    EXPECT_EQ(memory.used_bytes(), 0);
  }
}

// A record of another catalogue, and something that happens after the first piece that is read.
class Interrupted : public LayerRecord {
 public:
  Interrupted(std::shared_ptr<const LayerRecord> record, std::function<void()> happens)
      : record_(std::move(record)), happens_(std::move(happens)) {}
  const LayerInfo& info() const override { return record_->info(); }
  absl::StatusOr<std::unique_ptr<LayerReader>> Open() const override {
    auto reader = record_->Open();
    if (!reader.ok()) return reader.status();
    return std::make_unique<Reader>(*std::move(reader), happens_);
  }

 private:
  class Reader : public LayerReader {
   public:
    Reader(std::unique_ptr<LayerReader> reader, std::function<void()> happens)
        : reader_(std::move(reader)), happens_(std::move(happens)) {}
    absl::Status Next(std::string_view role, absl::Span<std::byte> out) override {
      auto status = reader_->Next(role, out);
      std::call_once(once_, happens_);
      return status;
    }
    absl::Status Finish() override { return reader_->Finish(); }

   private:
    const std::unique_ptr<LayerReader> reader_;
    const std::function<void()> happens_;
    std::once_flag once_;
  };

  const std::shared_ptr<const LayerRecord> record_;
  const std::function<void()> happens_;
};

// An uploaded layer whose weights come in three pieces each.
class StoredLayerPreparation : public testing::Test {
 protected:
  StoredLayerPreparation() : store_(OpenStore(folder_.path())), record_(*Upload(*store_, kA, layer_)) {}

  Prepared PrepareWhile(std::function<void()> happens) {
    auto promise = std::make_shared<std::promise<Prepared>>();
    layers_.Prepare(std::make_shared<Interrupted>(record_, std::move(happens)), false, absl::InfiniteFuture(),
                    [promise](Prepared prepared) { promise->set_value(std::move(prepared)); });
    return promise->get_future().get();
  }
  void ExpectDamaged(const Prepared& prepared, const std::string& part) {
    ExpectStoreError(prepared.status(), absl::StatusCode::kFailedPrecondition, "LAYER_DAMAGED", "", {kA, part});
    EXPECT_EQ(layers_.stats().memory_bytes, 0);
    EXPECT_EQ(layers_.stats().prepared, 0);
  }

  const Layer layer_ = SeededSwiGluLayer(1, 1024, 577);
  TemporaryFolder folder_;
  const std::unique_ptr<LayerStore> store_;
  const std::shared_ptr<const LayerRecord> record_;
  const std::string weights_ = folder_.File("weights/" + record_->info().weights_sha256 + ".safetensors");
  PreparedLayers layers_{{.memory_bytes = kBudget}};
};

TEST_F(StoredLayerPreparation, AFileThatBecomesShorterWhileItIsReadIsDamage) {
  ExpectDamaged(PrepareWhile([&] { std::filesystem::resize_file(weights_, 4096); }), "the file has become shorter");
}

TEST_F(StoredLayerPreparation, AFileThatIsWrittenOverWhileItIsReadIsDamage) {
  ExpectDamaged(PrepareWhile([&] {
                  std::fstream file(weights_, std::ios::in | std::ios::out | std::ios::binary);
                  for (size_t at = 1000; at < std::filesystem::file_size(weights_); at += 1 << 20) {
                    file.seekp(static_cast<std::streamoff>(at));
                    file.put('\x7f');
                  }
                }),
                "is not what it was: its SHA-256 differs");
}

TEST_F(StoredLayerPreparation, AFileThatIsReplacedOrRemovedWhileItIsReadIsReadToItsEnd) {
  for (const bool removed : {false, true}) {
    const auto prepared = PrepareWhile([&] {
      std::filesystem::rename(folder_.Write("other", "other weights"), weights_);
      if (removed) std::filesystem::remove(weights_);
    });
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    EXPECT_TRUE(SameBits(LayerOf(**prepared), layer_));
    EXPECT_EQ((*prepared)->content_hash, ContentHash(layer_));
    ASSERT_TRUE(Upload(*store_, kB, layer_).ok());  // mends the file
  }
}

// All that `layer` gives, asked for by so many bytes at a time.
std::string BytesOf(const std::shared_ptr<const PreparedLayer>& layer, size_t max_bytes) {
  auto bytes = LayerBytes::Of(layer);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  LayerBytes moved = *std::move(bytes);
  std::string all;
  for (;;) {
    const auto next = moved.Next(max_bytes);
    EXPECT_LE(next.size(), max_bytes);
    if (next.empty()) break;
    all.append(reinterpret_cast<const char*>(next.data()), next.size());
  }
  EXPECT_EQ(static_cast<int64_t>(all.size()), moved.size_bytes());
  EXPECT_TRUE(moved.Next(max_bytes).empty());
  return all;
}

TEST(LayerBytes, AreTheSafetensorsFileOfTheLayerInPiecesOfAnySize) {
  std::vector<Layer> layers = {Norm(1), SeededSwiGluLayer(1, 7, 5)};
  for (const FeedForwardLayer& layer : Layers()) layers.emplace_back(layer);
  for (const Layer& layer : layers) {
    const MemoryRecord record(kA, layer);
    LayerMemory memory(kBudget);
    const auto prepared = PrepareLayer(record, Arena(2), *memory.Take(1));
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    std::vector<std::pair<std::string, Tensor>> weights;
    for (const auto& [role, weight] : WeightsOf(layer)) weights.emplace_back(role, weight);
    std::string expected = SafetensorsHead(weights, {}, "").value();
    for (const auto& [role, weight] : weights) {
      expected.append(reinterpret_cast<const char*>(weight.data()), weight.num_bytes());
    }
    const bool is_small = expected.size() < 10'000;
    for (const size_t max_bytes :
         is_small ? std::vector<size_t>{1, 7, 31, 10'000} : std::vector<size_t>{99'991, 1 << 18}) {
      EXPECT_TRUE(BytesOf(*prepared, max_bytes) == expected) << max_bytes;
    }
  }
}

}  // namespace
}  // namespace layerd
