// Reading by pieces: lib/weights/layer_record.h over records in memory, and over files that change meanwhile.
#include "lib/weights/layer_record.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/errors.h"
#include "lib/weights/layer_hash.h"
#include "tests/lib/resident/memory_catalog.h"
#include "tests/lib/weights/checkpoint_files.h"

namespace layerd {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const char kName[] = "models/m/layers/l";

TEST(RowsOfPiece, AreBlocksOf64AsFarAsPiecesStaySmall) {
  const auto rows = [](DType dtype, const Shape& shape) { return RowsOfPiece(Tensor::WithoutData(dtype, shape)); };
  EXPECT_EQ(rows(DType::kFloat32, {11008, 4096}), 64);
  EXPECT_EQ(rows(DType::kBFloat16, {11008, 4096}), 128);
  EXPECT_EQ(rows(DType::kFloat16, {4096, 11008}), 64);  // 1.4 MiB
  EXPECT_EQ(rows(DType::kFloat32, {4096, 1365}), 192);  // 192.05 rows would be 1 MiB
  EXPECT_EQ(rows(DType::kFloat32, {10, 16384}), 64);    // 4 MiB
  EXPECT_EQ(rows(DType::kFloat32, {10, 16385}), 15);
  EXPECT_EQ(rows(DType::kFloat32, {5, 300'000}), 1);
  EXPECT_EQ(rows(DType::kFloat32, {11008}), kPieceBytes / 4);
  EXPECT_EQ(rows(DType::kFloat16, {3}), kPieceBytes / 2);
}

// What ReadPieces() gave, put together again. Threads: any.
class Collected {
 public:
  void Take(const WeightPiece& piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::string role(piece.role);
    std::vector<int64_t>& rows = rows_[role];
    int64_t before = 0;
    for (const int64_t one : rows) before += one;
    EXPECT_EQ(piece.first_row, before) << role;
    rows.push_back(piece.rows);
    bytes_[role].append(reinterpret_cast<const char*>(piece.bytes.data()), piece.bytes.size());
  }
  auto Taker() {
    return [this](const WeightPiece& piece) { Take(piece); };
  }

  const std::vector<int64_t>& RowsOf(const std::string& role) { return rows_[role]; }
  size_t weights() const { return rows_.size(); }
  // Whether this is the layer, all of it and nothing else.
  bool Is(const Layer& layer) const {
    const auto weights = WeightsOf(layer);
    if (bytes_.size() != weights.size()) return false;
    for (const auto& [role, weight] : weights) {
      const auto found = bytes_.find(std::string(role));
      const std::string_view bytes(reinterpret_cast<const char*>(weight.data()), weight.num_bytes());
      if (found == bytes_.end() || found->second != bytes) return false;
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<int64_t>> rows_;
  std::map<std::string, std::string> bytes_;
};

TEST(ReadPieces, GivesEachWeightFromItsFirstRowToItsLastInPiecesThatAreBounded) {
  for (const auto& [dim, hidden_dim, pieces_of_gate, pieces_of_down] :
       {std::tuple<int64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>>{2, 3, {3}, {2}},
        {1024, 577, {256, 256, 65}, {448, 448, 128}},
        {50'000, 13, {5, 5, 3}, {20'160, 20'160, 9'680}},
        {300'000, 3, {1, 1, 1}, {87'360, 87'360, 87'360, 37'920}}}) {
    const Layer layer = SeededSwiGluLayer(1, dim, hidden_dim);
    MemoryRecord record(kName, layer);
    std::mutex mutex;
    std::map<std::string, const std::byte*> buffers;
    record.before_piece = [&](std::string_view role, size_t, absl::Span<std::byte> out) {
      const std::lock_guard<std::mutex> lock(mutex);
      buffers[std::string(role)] = out.data();
      EXPECT_LE(out.size(), 4u << 20);
      return absl::OkStatus();
    };
    for (const int threads : {1, 3}) {
      Collected collected;
      const Arena arena(threads);
      const absl::Status status = ReadPieces(record, arena, [&](const WeightPiece& piece) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          EXPECT_EQ(piece.bytes.data(), buffers[std::string(piece.role)]) << "copied";
        }
        collected.Take(piece);
      });
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(collected.Is(layer));
      EXPECT_EQ(collected.RowsOf("gate"), pieces_of_gate);
      EXPECT_EQ(collected.RowsOf("down"), pieces_of_down);
    }
    EXPECT_EQ(ContentHash(*record.Read()), ContentHash(layer));
  }
}

TEST(ReadPieces, GivesVectorsByElements) {
  FeedForwardLayer layer;
  layer.spec.packing = GateUpPacking::kHalves;
  layer.spec.inner_norm = InnerNorm{};
  layer.weights = SeededFeedForwardWeights(1, layer.spec, DType::kBFloat16, 3, 5, /*biases=*/true);
  const MemoryRecord record(kName, layer);
  Collected collected;
  ASSERT_TRUE(ReadPieces(record, Arena(2), collected.Taker()).ok());
  EXPECT_TRUE(collected.Is(layer));
  EXPECT_THAT(collected.RowsOf("gate_up_bias"), ElementsAre(10));
  EXPECT_THAT(collected.RowsOf("inner_norm_gamma"), ElementsAre(5));
}

TEST(ReadPieces, TheFirstFailureEndsItAndIsTheAnswer) {
  const absl::Status damaged =
      WithDetails(absl::StatusCode::kFailedPrecondition, "worn out", {.reason = "LAYER_DAMAGED"});
  for (const int threads : {1, 3}) {
    MemoryRecord record(kName, SeededSwiGluLayer(1, 1024, 577));
    bool finished = false;
    record.before_finish = [&] {
      finished = true;
      return absl::OkStatus();
    };
    record.before_piece = [&](std::string_view role, size_t at, absl::Span<std::byte>) {
      return role == "gate" && at > 0 ? damaged : absl::OkStatus();
    };
    Collected collected;
    EXPECT_EQ(ReadPieces(record, Arena(threads), collected.Taker()), damaged);
    EXPECT_THAT(collected.RowsOf("gate"), ElementsAre(256));
    if (threads == 1) {
      EXPECT_EQ(collected.weights(), 1u);  // nothing was begun after it
    }
    EXPECT_FALSE(finished);
    EXPECT_EQ(record.Read().ok(), true);  // in one piece, that begins at 0
  }
}

TEST(ReadPieces, WhatOpeningAndTheEndSayIsTheAnswer) {
  MemoryRecord record(kName, SeededSwiGluLayer(1, 2, 3));
  Collected collected;
  record.before_finish = [] { return absl::AbortedError("changed"); };
  EXPECT_EQ(ReadPieces(record, Arena(1), collected.Taker()).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(record.Read().status().code(), absl::StatusCode::kAborted);
  record.gone = true;
  Collected nothing;
  EXPECT_EQ(ReadPieces(record, Arena(1), nothing.Taker()).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(nothing.weights(), 0u);
  EXPECT_EQ(record.Read().status().code(), absl::StatusCode::kNotFound);
}

// A layer of a checkpoint whose gate comes in three pieces, and something that happens to its file after the first.
class ChangingFile : public testing::Test {
 protected:
  ChangingFile() {
    WriteLayer(1);
    fs::last_write_time(path_, fs::file_time_type(std::chrono::seconds(1)));
    const auto checkpoint = Checkpoint::Open(path_, "m", {.activation = Activation::kSilu});
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    record_ = *checkpoint->Find("mlp");
  }

  void WriteLayer(uint64_t seed) {
    layers_.push_back(SeededSwiGluLayer(seed, 1024, 577));
    std::map<std::string, Tensor> tensors;
    for (const auto& [role, weight] : WeightsOf(layers_.back())) {
      tensors.emplace("mlp." + std::string(role) + "_proj.weight", weight);
    }
    ASSERT_TRUE(WriteSafetensors(path_, tensors).ok());
  }

  absl::Status ReadWhile(const std::function<void()>& happens) {
    bool happened = false;
    return ReadPieces(*record_, Arena(1), [&](const WeightPiece& piece) {
      if (!std::exchange(happened, true)) happens();
      collected_.Take(piece);
    });
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_.File("one.safetensors");
  std::vector<Layer> layers_;
  std::shared_ptr<const LayerRecord> record_;
  Collected collected_;
};

TEST_F(ChangingFile, AFileThatBecomesShorterWhileItIsReadIsDamage) {
  const auto status = ReadWhile([&] { fs::resize_file(path_, 4096); });
  ExpectUnusable(status, "LAYER_DAMAGED", {"one.safetensors", "became shorter while it was read"});
  EXPECT_THAT(collected_.RowsOf("gate"), ElementsAre(256));
  EXPECT_THAT(collected_.RowsOf("down"), IsEmpty());
}

TEST_F(ChangingFile, AFileThatIsWrittenOverWhileItIsReadIsDamage) {
  const auto status = ReadWhile([&] {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x7f');
    file.close();
    fs::last_write_time(path_, fs::file_time_type(std::chrono::seconds(2)));
  });
  ExpectUnusable(status, "LAYER_DAMAGED", {"one.safetensors", "changed after the checkpoint was opened"});
}

TEST_F(ChangingFile, AFileThatIsReplacedWhileItIsReadIsReadToItsEnd) {
  ASSERT_TRUE(ReadWhile([&] { WriteLayer(2); }).ok());
  EXPECT_TRUE(collected_.Is(layers_[0]));
  EXPECT_FALSE(collected_.Is(layers_[1]));
}

}  // namespace
}  // namespace layerd
