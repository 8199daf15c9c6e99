// N1: a row of the result depends on that row, the weights and the options, and on nothing else: not on the batch, the
// rows beside it, the number of threads, or what was computed before. To the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/layers/layer_testing.h"

namespace layerd {
namespace {

constexpr int64_t kMostRows = 511;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Every tensor that an answer may have.
using Tensors = std::vector<std::optional<Tensor>>;
Tensors TensorsOf(const FeedForwardOutputs& outputs) {
  return {outputs.output, outputs.gate, outputs.up, outputs.hidden, outputs.normed};
}
Tensors TensorsOf(const NormalizeOutputs& outputs) {
  return {outputs.output, outputs.residual_sum, outputs.inverse_rms, outputs.mean};
}

const std::byte* RowAt(const Tensor& tensor, int64_t row) {
  return tensor.data() + row * static_cast<int64_t>(tensor.num_bytes()) / tensor.dim(0);
}

// What each row gives alone, by compute(arena, first, count, statistics or intermediates wanted) of rows of some input.
template <typename Compute>
class Answers {
 public:
  Answers(const Compute& compute, int64_t rows) : compute_(compute) {
    const Arena arena(1);
    for (int64_t row = 0; row < rows; ++row) alone_.push_back(TensorsOf(compute(arena, row, 1, true)));
  }

  // The rows of a batch have them. Which rows those are changes with `turn`.
  void ExpectInBatch(const Arena& arena, int64_t rows, int64_t turn) const {
    const int64_t first = turn * 53 % (static_cast<int64_t>(alone_.size()) - rows + 1);
    const bool all = rows % 2 == 0;
    const Tensors batch = TensorsOf(compute_(arena, first, rows, all));
    int64_t compared = 0;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (all) {
        EXPECT_EQ(batch[i].has_value(), alone_[0][i].has_value()) << i;
      }
      if (!batch[i]) continue;
      for (int64_t row = 0; row < rows; ++row) {
        const Tensor& want = *alone_[first + row][i];
        ASSERT_EQ(batch[i]->num_bytes(), want.num_bytes() * static_cast<size_t>(rows));
        ++compared;
        ASSERT_EQ(std::memcmp(RowAt(*batch[i], row), want.data(), want.num_bytes()), 0)
            << "row " << row << " of " << rows << " on " << arena.threads() << " threads, tensor " << i;
      }
    }
    EXPECT_GE(compared, rows);
  }

 private:
  const Compute compute_;
  std::vector<Tensors> alone_;
};

struct Batches {
  std::vector<int64_t> sizes;
  std::vector<int64_t> again;  // after other traffic
};

Batches AllBatches() {
  if (kSanitized) return {{2, 7, 65}, {1, 13, 66}};
  std::vector<int64_t> sizes(64);
  std::iota(sizes.begin(), sizes.end(), 2);
  sizes.insert(sizes.end(), {255, 256, kMostRows});
  return {sizes, {1, 2, 6, 13, 65, 256}};
}
Batches SomeBatches() {
  if (kSanitized) return {{2, 65}, {1, 66}};
  return {{2, 3, 4, 5, 6, 7, 8, 12, 13, 31, 64, 65, 255, 256, kMostRows}, {1, 5, 64, 255}};
}

Tensor Constant(DType dtype, int64_t rows, int64_t dim, float value) {
  return Tensor::FromFloats(dtype, {rows, dim}, std::vector<float>(rows * dim, value));
}

class OneRowOneAnswerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { ASSERT_TRUE(InitMatMul(true).ok()); }

  // All of N1 for one layer: `other` is a layer of another shape whose calls come between.
  void ExpectOneAnswer(const TestLayer& layer, const Tensor& input, const Batches& batches, const TestLayer& other,
                       int64_t other_dim) {
    const auto compute = [&](const Arena& arena, int64_t first, int64_t count, bool all) {
      return layer.Compute(arena, RowsOf(input, first, count), all);
    };
    const Answers answers(compute, input.dim(0));
    int64_t turn = 0;
    for (const Arena* arena : arenas_) {
      for (const int64_t rows : batches.sizes) answers.ExpectInBatch(*arena, rows, ++turn);
      for (const float poison : {kNan, kInf, -kInf, std::numeric_limits<float>::max()}) {
        for (const int64_t rows : {1, 7, 70}) {
          const Tensor poisoned = layer.Compute(*arena, Constant(input.dtype(), rows, input.dim(1), poison)).output;
          if (std::isnan(poison)) {
            for (int64_t i = 0; i < poisoned.num_elements(); ++i) ASSERT_TRUE(std::isnan(poisoned.At(i)));
          }
        }
      }
      for (const int64_t rows : batches.again) answers.ExpectInBatch(*arena, rows, ++turn);
      for (const int64_t rows : {1, 70}) other.Compute(*arena, Constant(DType::kFloat32, rows, other_dim, kNan), true);
      for (const int64_t rows : batches.again) answers.ExpectInBatch(*arena, rows, ++turn);
    }
  }

  const Arena one_{1}, two_{2}, five_{5};
  const std::vector<const Arena*> arenas_ = {&one_, &two_, &five_};
};

int64_t RowsOfInput() { return kSanitized ? 66 : kMostRows; }

TEST_F(OneRowOneAnswerTest, EveryFormDTypeAndOrientationPackedOrNot) {
  constexpr int64_t kDim = 45, kHidden = 70, kOtherDim = 97;
  const TestLayer other(SwiGluSpec(), SeededFeedForwardWeights(1, SwiGluSpec(), DType::kFloat32, kOtherDim, 40, true),
                        true);
  int layers = 0;
  ForEachLayer(kDim, kHidden, [&](const std::string& name, const TestLayer& layer) {
    if (kSanitized && layers++ % 5 != 0) return;
    // Rows of 16 bits too, which are widened on their way in and rounded on their way out.
    const DType dtype = name.find("bfloat16") != name.npos ? DType::kBFloat16 : DType::kFloat32;
    ExpectOneAnswer(layer, SeededInput(5, dtype, {RowsOfInput(), kDim}), AllBatches(), other, kOtherDim);
  });
}

// Wide enough that several blocks of inputs are summed, and that even a few rows are divided over threads.
TEST_F(OneRowOneAnswerTest, WiderLayers) {
  constexpr int64_t kDim = 270, kHidden = 530, kOtherDim = 33;
  const TestLayer other(ReluSpec(), SeededFeedForwardWeights(1, ReluSpec(), DType::kFloat16, kOtherDim, 900, true),
                        false);
  const Tensor input = SeededInput(6, DType::kFloat32, {RowsOfInput(), kDim});
  const LayerForm swiglu = LayerForms()[0], inner_norm = LayerForms()[3];
  const DType f32 = DType::kFloat32, bf16 = DType::kBFloat16, int8 = DType::kInt8;
  for (const auto& [form, layout, kind, packed] :
       {std::tuple(swiglu, WeightLayout::kInOut, WeightKind{"float32", f32, f32, f32}, false),
        std::tuple(swiglu, WeightLayout::kOutIn, WeightKind{"float32", f32, f32, f32}, false),
        std::tuple(inner_norm, WeightLayout::kOutIn, WeightKind{"float32", f32, f32, f32}, true),
        std::tuple(swiglu, WeightLayout::kInOut, WeightKind{"bfloat16", bf16, bf16, bf16}, true),
        std::tuple(swiglu, WeightLayout::kOutIn, WeightKind{"int8", int8, int8, int8}, true),
        std::tuple(swiglu, WeightLayout::kOutIn, WeightKind{"two", int8, f32, bf16}, true)}) {
    SCOPED_TRACE(form.name + " " + kind.name + (packed ? " packed" : ""));
    LayerForm of_layout = form;
    of_layout.spec.layout = layout;
    const TestLayer layer(of_layout.spec, MakeWeights(of_layout, kind, kDim, kHidden), packed);
    ExpectOneAnswer(layer, input, SomeBatches(), other, kOtherDim);
    if (kSanitized) break;
  }
}

// So many wide rows that they are computed in two chunks: what is answered of the values inside is of all of them.
TEST_F(OneRowOneAnswerTest, RowsOfMoreThanOneChunk) {
  constexpr int64_t kDim = 3, kHidden = 4096, kRows = 1100;
  LayerForm inner_norm = LayerForms()[3];
  const FeedForwardWeights weights = MakeWeights(inner_norm, WeightKinds(WeightLayout::kOutIn)[2], kDim, kHidden);
  const Tensor input = SeededInput(8, DType::kFloat32, {kRows, kDim});
  for (const bool packed : {false, true}) {
    const TestLayer layer(inner_norm.spec, weights, packed);
    const Tensors all = TensorsOf(layer.Compute(two_, input, true));
    for (const int64_t row : {int64_t{0}, kRows / 2 - 1, kRows / 2, kRows / 2 + 1, kRows - 1}) {
      const Tensors alone = TensorsOf(layer.Compute(one_, RowsOf(input, row, 1), true));
      for (size_t i = 0; i < all.size(); ++i) {
        ASSERT_TRUE(all[i] && alone[i]) << i;
        EXPECT_EQ(std::memcmp(RowAt(*all[i], row), alone[i]->data(), alone[i]->num_bytes()), 0) << row << " " << i;
      }
    }
  }
}

// Callers of one arena at the same time, clean ones and such that bring NaN.
TEST_F(OneRowOneAnswerTest, CallersAtTheSameTime) {
  constexpr int64_t kDim = 150, kHidden = 200;
  const Arena arena(2);
  const LayerForm form = LayerForms()[3];
  const FeedForwardWeights weights = MakeWeights(form, WeightKinds(WeightLayout::kOutIn)[2], kDim, kHidden);
  const TestLayer came(form.spec, weights, false), packed(form.spec, weights, true);
  const Tensor input = SeededInput(7, DType::kFloat32, {70, kDim});
  const Tensor poisoned = Constant(DType::kFloat32, 70, kDim, kNan);
  const Tensor expected = came.Compute(Arena(1), input).output;
  std::vector<std::thread> callers;
  std::vector<int> wrong(6);
  for (size_t caller = 0; caller < wrong.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int64_t round = 0; round < 20; ++round) {
        const TestLayer& layer = (caller + static_cast<size_t>(round)) % 2 == 0 ? came : packed;
        if (caller % 3 == 0) {
          layer.Compute(arena, poisoned);
          continue;
        }
        const int64_t rows = 1 + (round * 17 + static_cast<int64_t>(caller)) % 70;
        const Tensor output = layer.Compute(arena, RowsOf(input, 70 - rows, rows)).output;
        wrong[caller] += std::memcmp(output.data(), RowAt(expected, 70 - rows), output.num_bytes()) != 0;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, std::vector<int>(wrong.size()));
}

// Rows of `inputs` whose tensors of rows are those of some of its rows.
NormalizeInputs RowsOf(const NormalizeInputs& inputs, int64_t first, int64_t count) {
  NormalizeInputs rows = inputs;
  rows.input = RowsOf(inputs.input, first, count);
  if (inputs.residual) rows.residual = RowsOf(*inputs.residual, first, count);
  if (inputs.gate) rows.gate = RowsOf(*inputs.gate, first, count);
  return rows;
}

struct NormCase {
  NormKind kind;
  GatePosition gate;
  bool residual;
  DType dtype;
  int64_t dim, groups;
};

TEST_F(OneRowOneAnswerTest, Norms) {
  constexpr auto kRms = NormKind::kRmsNorm, kLayer = NormKind::kLayerNorm;
  constexpr auto kNone = GatePosition::kNone, kFirst = GatePosition::kFirst, kLast = GatePosition::kLast;
  const NormCase cases[] = {
      {kRms, kNone, false, DType::kFloat32, 300, 1},
      {kLayer, kNone, false, DType::kFloat32, 300, 1},
      {kRms, kNone, true, DType::kBFloat16, 77, 1},
      {kLayer, kNone, true, DType::kFloat16, 77, 1},
      {kRms, kFirst, false, DType::kFloat32, 96, 6},
      {kLayer, kLast, true, DType::kBFloat16, 96, 3},
      {kRms, kLast, true, DType::kFloat32, 1, 1},
      {kRms, kNone, false, DType::kFloat16, 8192 + 33, 1},
      {kLayer, kNone, false, DType::kFloat32, 8192 + 33, 1},
  };
  for (const NormCase& one : cases) {
    SCOPED_TRACE(testing::Message() << "kind " << static_cast<int>(one.kind) << " of " << one.dim << " "
                                    << Name(one.dtype) << " gate " << static_cast<int>(one.gate) << " residual "
                                    << one.residual);
    const bool long_rows = one.dim > 1000;
    const int64_t rows = long_rows ? 66 : RowsOfInput();
    NormalizeSpec spec;
    spec.kind = one.kind;
    spec.gate_position = one.gate;
    spec.rounding = NormRounding::kBeforeGamma;
    spec.group_size = one.dim / one.groups;
    NormalizeInputs inputs;
    inputs.input = SeededInput(8, one.dtype, {rows, one.dim});
    inputs.gamma = SeededGamma(8, DType::kFloat32, one.dim);
    if (one.kind == kLayer) inputs.beta = SeededBeta(8, DType::kFloat16, one.dim);
    if (one.residual) inputs.residual = SeededTensor(8, "residual", one.dtype, {rows, one.dim}, 1.0);
    if (one.gate != kNone) inputs.gate = SeededTensor(8, "gate", one.dtype, {rows, one.dim}, 2.0);
    const auto compute = [&](const Arena& arena, int64_t first, int64_t count, bool statistics) {
      auto outputs = Normalize(arena, spec, RowsOf(inputs, first, count), std::nullopt, statistics);
      EXPECT_TRUE(outputs.ok()) << outputs.status();
      return *std::move(outputs);
    };
    const Answers answers(compute, rows);
    const Batches batches = long_rows || kSanitized ? Batches{{2, 3, 16, 65}, {1, 7}} : AllBatches();
    int64_t turn = 0;
    for (const Arena* arena : arenas_) {
      for (const int64_t size : batches.sizes) answers.ExpectInBatch(*arena, size, ++turn);
      for (const float poison : {kNan, kInf}) {
        NormalizeInputs poisoned = inputs;
        poisoned.input = Constant(one.dtype, rows, one.dim, poison);
        ASSERT_TRUE(Normalize(*arena, spec, poisoned, std::nullopt, true).ok());
      }
      for (const int64_t size : batches.again) answers.ExpectInBatch(*arena, size, ++turn);
    }
  }
}

// A row so long that threads may share it.
TEST_F(OneRowOneAnswerTest, NormsOfLongRows) {
  const int64_t dim = kSanitized ? 70'001 : 1'000'003;
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    NormalizeSpec spec;
    spec.kind = kind;
    NormalizeInputs inputs;
    inputs.input = SeededInput(9, DType::kFloat32, {3, dim});
    const auto compute = [&](const Arena& arena, int64_t first, int64_t count, bool statistics) {
      return *Normalize(arena, spec, RowsOf(inputs, first, count), std::nullopt, statistics);
    };
    const Answers answers(compute, 3);
    for (const Arena* arena : arenas_) {
      for (const int64_t rows : {1, 2, 3}) answers.ExpectInBatch(*arena, rows, rows);
    }
  }
}

}  // namespace
}  // namespace layerd
