// Batching is invisible: many threads, several layers, and each answer has the bits of the layer alone.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "lib/engine/batching_engine.h"
#include "lib/engine/cpu_engine.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

constexpr int64_t kMostRows = 40;
constexpr std::array kDtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// A layer, inputs of every dtype, and what it gives for all of their rows, in every output dtype.
struct KnownLayer {
  KnownLayer(uint64_t seed, DType dtype, FeedForwardForm form, int64_t dim, int64_t hidden_dim, bool inner_norm) {
    spec.form = form;
    if (inner_norm) spec.inner_norm = InnerNorm{};
    weights = SeededFeedForwardWeights(seed, spec, dtype, dim, hidden_dim, /*biases=*/true);
    const Arena arena(1);
    packed = std::make_shared<const PackedFeedForward>(PackedFeedForward::Of(arena, spec, weights));
    for (size_t in = 0; in < kDtypes.size(); ++in) {
      inputs[in] = SeededInput(seed + in, kDtypes[in], {kMostRows, dim});
      for (size_t out = 0; out < kDtypes.size(); ++out) {
        expected[in][out] = *FeedForward(arena, spec, weights, inputs[in], kDtypes[out], /*intermediates=*/true);
      }
    }
  }

  FeedForwardSpec spec;
  FeedForwardWeights weights;
  std::shared_ptr<const PackedFeedForward> packed;
  std::array<Tensor, 3> inputs;
  std::array<std::array<FeedForwardOutputs, 3>, 3> expected;
};

void ExpectRows(const Tensor& got, const Tensor& all, int64_t first, int64_t rows) {
  EXPECT_TRUE(SameBits(got, all.Rows(first, rows).Reshaped(got.shape())));
}
void ExpectRows(const std::optional<Tensor>& got, const std::optional<Tensor>& all, int64_t first, int64_t rows,
                bool wanted) {
  ASSERT_EQ(got.has_value(), wanted && all.has_value());
  if (got) ExpectRows(*got, *all, first, rows);
}

struct Tally {
  std::atomic<int> answered = 0, expired = 0, cancelled = 0;
};

// One random call after another, each waited for.
void CallAtRandom(LayerEngine& engine, const std::vector<KnownLayer>& layers, uint64_t seed, int calls, Tally& tally) {
  std::mt19937_64 random(seed);
  const auto below = [&random](uint64_t n) { return static_cast<int64_t>(random() % n); };
  for (int i = 0; i < calls; ++i) {
    const KnownLayer& layer = layers[below(layers.size())];
    const int64_t in = below(3), out = below(4), rows = below(4) == 0 ? 1 + below(kMostRows) : 1 + below(3);
    const int64_t first = below(static_cast<uint64_t>(kMostRows - rows + 1));
    FeedForwardCall call;
    call.spec = layer.spec;
    call.packed = layer.packed;
    call.weights = layer.packed->outline();
    if (below(8) == 0) {  // a call that brings its weights with it
      call.packed = nullptr;
      call.weights = layer.weights;
    }
    call.input = layer.inputs[in].Rows(first, rows);
    if (out < 3) call.output_dtype = kDtypes[out];
    call.intermediates = below(3) == 0;
    std::optional<Tensor> place;
    if (below(3) == 0) {
      place = Tensor::Allocate(call.output_dtype.value_or(call.input.dtype()), {rows, layer.packed->extent().out_dim});
      call.output_memory = MemoryPlace{std::shared_ptr<std::byte>(std::shared_ptr<void>(), place->mutable_data()),
                                       static_cast<int64_t>(place->num_bytes())};
    }
    auto cancelled = std::make_shared<std::atomic<bool>>(false);
    call.context.cancelled = cancelled;
    if (below(3) == 0) call.context.deadline = absl::Now() + absl::Microseconds(below(2000));
    const bool to_cancel = below(5) == 0;
    std::promise<absl::StatusOr<FeedForwardResult>> answer;
    engine.FeedForward(call, [&answer](absl::StatusOr<FeedForwardResult> got) { answer.set_value(std::move(got)); });
    if (to_cancel) cancelled->store(true);
    const auto result = answer.get_future().get();
    if (result.ok()) {
      ++tally.answered;
      Shape shape = {rows, layer.packed->extent().out_dim};
      EXPECT_EQ(result->outputs.output.shape(), shape);
      if (place) {
        EXPECT_EQ(result->outputs.output.data(), place->data());
      }
      const FeedForwardOutputs& expected = layer.expected[in][out < 3 ? out : in];
      ExpectRows(result->outputs.output, expected.output, first, rows);
      ExpectRows(result->outputs.gate, expected.gate, first, rows, call.intermediates);
      ExpectRows(result->outputs.up, expected.up, first, rows, call.intermediates);
      ExpectRows(result->outputs.hidden, expected.hidden, first, rows, call.intermediates);
      ExpectRows(result->outputs.normed, expected.normed, first, rows, call.intermediates);
    } else if (result.status().code() == absl::StatusCode::kCancelled) {
      EXPECT_TRUE(to_cancel);
      ++tally.cancelled;
    } else {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
      EXPECT_LE(call.context.deadline, absl::Now());
      ++tally.expired;
    }
  }
}

class BatchingBitsTest : public testing::TestWithParam<BatchingEngineOptions> {};

TEST_P(BatchingBitsTest, EveryAnswerHasTheBitsOfTheLayerAlone) {
  constexpr int kCallers = 12, kCalls = 40;
  std::vector<KnownLayer> layers;
  layers.emplace_back(1, DType::kBFloat16, FeedForwardForm::kGated, 48, 80, false);
  layers.emplace_back(2, DType::kFloat32, FeedForwardForm::kPlain, 33, 70, false);
  layers.emplace_back(3, DType::kFloat16, FeedForwardForm::kGated, 16, 300, true);
  CpuEngine cpu({.threads = GetParam().workers, .at_once_work = 1 << 15});  // some calls are, and some are not
  Tally tally;
  {
    BatchingEngine engine(GetParam(), cpu);
    std::vector<std::thread> callers;
    callers.reserve(kCallers);
    for (int caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&, caller] { CallAtRandom(engine, layers, caller, kCalls, tally); });
    }
    for (std::thread& caller : callers) caller.join();
  }
  EXPECT_EQ(tally.answered + tally.expired + tally.cancelled, kCallers * kCalls);
  EXPECT_GT(tally.answered, 0);
}

// Heavy or light, divided or not: what the daemon's layers are by their size, these are by the options.
BatchingEngineOptions Options(int workers, int64_t batch_rows, int64_t heavy_weights,
                              absl::Duration delay = absl::ZeroDuration()) {
  BatchingEngineOptions options{.workers = workers, .batch_delay = delay};
  options.sizes.batch_rows = batch_rows;
  options.sizes.heavy_weights = heavy_weights;
  options.sizes.least_part_work = 0;
  return options;
}

INSTANTIATE_TEST_SUITE_P(BatchingEngine, BatchingBitsTest,
                         testing::Values(Options(1, 16, 1), Options(2, 7, 1), Options(2, 64, 10000),
                                         Options(3, 4, 1 << 20), Options(2, 16, 1, absl::Microseconds(200))));

// Counts the calls that the batches became.
class CountingEngine : public LayerEngine {
 public:
  explicit CountingEngine(LayerEngine& inner) : inner_(inner) {}
  void Normalize(NormalizeCall call, NormalizeDone done) override {
    inner_.Normalize(std::move(call), std::move(done));
  }
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override {
    ++calls;
    inner_.FeedForward(std::move(call), std::move(done));
  }
  std::atomic<int> calls = 0;

 private:
  LayerEngine& inner_;
};

// What waits for one layer while the only worker is busy is one product.
TEST(BatchingEngineOverCpuEngineTest, CallersOfOneRowShareAProduct) {
  constexpr int kCallers = 16;
  const KnownLayer layer(1, DType::kBFloat16, FeedForwardForm::kGated, 256, 512, false);
  CpuEngine cpu({.threads = 1});
  CountingEngine counting(cpu);
  std::vector<std::promise<absl::StatusOr<FeedForwardResult>>> answers(kCallers);
  std::promise<void> release;
  {
    BatchingEngine engine({.workers = 1}, counting);
    NormalizeCall busy;
    busy.inputs.input = SeededInput(1, DType::kFloat32, {1, 16});
    engine.Normalize(busy, [&](const absl::StatusOr<NormalizeResult>&) { release.get_future().wait(); });
    for (int caller = 0; caller < kCallers; ++caller) {
      FeedForwardCall call;
      call.spec = layer.spec;
      call.packed = layer.packed;
      call.weights = layer.packed->outline();
      call.input = layer.inputs[2].Rows(caller, 1);
      engine.FeedForward(call, [&answers, caller](absl::StatusOr<FeedForwardResult> result) {
        answers[caller].set_value(std::move(result));
      });
    }
    release.set_value();
  }
  EXPECT_EQ(counting.calls, 1);
  for (int caller = 0; caller < kCallers; ++caller) {
    const auto result = answers[caller].get_future().get();
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectRows(result->outputs.output, layer.expected[2][2].output, caller, 1);
  }
}

}  // namespace
}  // namespace layerd
