// What the contract suite (tests/contract) cannot see from outside.
#include "lib/engine/resident_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/engine/cpu_engine.h"
#include "lib/resident/layer_library.h"
#include "lib/weights/layer_hash.h"
#include "tests/lib/resident/memory_catalog.h"

namespace layerd {
namespace {

constexpr int64_t kDim = 16, kHiddenDim = 24;
const char kName[] = "models/m/layers/l";

FeedForwardCall CallOf(const std::string& name) {
  FeedForwardCall call;
  call.layer = name;
  call.input = SeededInput(1, DType::kFloat32, {2, kDim});
  return call;
}

// Keeps the calls it gets.
class KeepingEngine : public LayerEngine {
 public:
  void Normalize(NormalizeCall call, NormalizeDone done) override {
    norms.emplace_back(std::move(call), std::move(done));
  }
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override {
    layers.emplace_back(std::move(call), std::move(done));
  }
  std::vector<std::pair<NormalizeCall, NormalizeDone>> norms;
  std::vector<std::pair<FeedForwardCall, FeedForwardDone>> layers;
};

class ResidentEngineTest : public testing::Test {
 protected:
  MemoryCatalog catalog_;
};

TEST_F(ResidentEngineTest, TheInnerEngineGetsTheLayerInPlaceOfItsName) {
  const auto layer = std::get<FeedForwardLayer>(SeededSwiGluLayer(1, kDim, kHiddenDim));
  catalog_.Put(kName, layer);
  LayerLibrary library({&catalog_}, {});
  ASSERT_TRUE(Acquire(library, kName).ok());
  KeepingEngine inner;
  ResidentEngine engine(library, inner);
  FeedForwardCall call = CallOf(kName);
  call.said.activation = Activation::kSilu;
  call.verify = call.intermediates = true;
  call.output_dtype = DType::kBFloat16;
  call.context.deadline = absl::Now() + absl::Hours(1);
  std::optional<absl::StatusOr<FeedForwardResult>> answer;
  engine.FeedForward(call, [&](absl::StatusOr<FeedForwardResult> result) { answer = std::move(result); });
  ASSERT_EQ(inner.layers.size(), 1u);
  auto& [passed, done] = inner.layers.front();
  EXPECT_EQ(passed.layer, "");
  EXPECT_FALSE(passed.said.activation.has_value());
  ASSERT_NE(passed.packed, nullptr);
  EXPECT_TRUE(SameBits(*passed.packed->Unpacked().down, *layer.weights.down));
  EXPECT_EQ(passed.weights.down->shape(), layer.weights.down->shape());
  EXPECT_EQ(passed.weights.down->data(), nullptr);
  EXPECT_EQ(passed.output_dtype, call.output_dtype);
  EXPECT_EQ(passed.context.deadline, call.context.deadline);
  EXPECT_TRUE(passed.verify);
  EXPECT_TRUE(passed.intermediates);
  done(Overloaded("busy", 7));
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(DetailsOf(answer->status()).retry_delay_ms, 7);
}

TEST_F(ResidentEngineTest, CallsWithoutANameGoThroughAsTheyAre) {
  LayerLibrary library({&catalog_}, {});
  KeepingEngine inner;
  ResidentEngine engine(library, inner);
  NormalizeCall call;
  call.inputs.input = SeededInput(1, DType::kFloat32, {2, kDim});
  call.inputs.gamma = SeededGamma(1, DType::kFloat32, kDim);
  call.spec.epsilon = 0.5;
  engine.Normalize(call, [](const absl::StatusOr<NormalizeResult>&) {});
  ASSERT_EQ(inner.norms.size(), 1u);
  EXPECT_EQ(inner.norms[0].first.spec.epsilon, 0.5);
  EXPECT_EQ(inner.norms[0].first.inputs.gamma->data(), call.inputs.gamma->data());  // no copy
}

TEST_F(ResidentEngineTest, ALayerIsInUseUntilItsCallIsAnswered) {
  const auto layer = std::get<FeedForwardLayer>(SeededSwiGluLayer(1, kDim, kHiddenDim));
  catalog_.Put(kName, layer);
  catalog_.Put("models/m/layers/other", SeededSwiGluLayer(2, kDim, kHiddenDim));
  const int64_t bytes = PackedFeedForward::BytesOf(layer.spec, layer.weights);
  LayerLibrary library({&catalog_}, {.memory_bytes = bytes, .memory_wait = absl::ZeroDuration()});
  ASSERT_TRUE(Acquire(library, kName).ok());
  KeepingEngine inner;
  ResidentEngine engine(library, inner);
  engine.FeedForward(CallOf(kName), [](const absl::StatusOr<FeedForwardResult>&) {});
  ASSERT_EQ(inner.layers.size(), 1u);
  EXPECT_EQ(DetailsOf(FeedForward(engine, CallOf("models/m/layers/other")).status()).reason, "OVERLOADED");
  EXPECT_EQ(library.stats().memory_bytes, bytes);
  auto weights = inner.layers.front().first.packed;
  inner.layers.clear();
  EXPECT_EQ(library.stats().memory_bytes, bytes);
  weights.reset();
  EXPECT_EQ(library.stats().memory_bytes, 0);
}

TEST_F(ResidentEngineTest, NothingIsReadForACallThatIsNotWanted) {
  const auto record = catalog_.Put(kName, SeededSwiGluLayer(1, kDim, kHiddenDim));
  LayerLibrary library({&catalog_}, {});
  KeepingEngine inner;
  ResidentEngine engine(library, inner);
  FeedForwardCall call = CallOf(kName);
  call.context.deadline = absl::InfinitePast();
  EXPECT_EQ(FeedForward(engine, call).status().code(), absl::StatusCode::kDeadlineExceeded);
  call = CallOf(kName);
  call.context.cancelled = std::make_shared<std::atomic<bool>>(true);
  EXPECT_EQ(FeedForward(engine, call).status().code(), absl::StatusCode::kCancelled);
  call = CallOf(kName);
  call.weights.down = SeededGamma(1, DType::kFloat32, kDim);
  EXPECT_EQ(DetailsOf(FeedForward(engine, call).status()).reason, "TWO_SOURCES");
  EXPECT_EQ(record->reads, 0);
  EXPECT_TRUE(inner.layers.empty());
}

// A layer is deleted and comes anew while calls for it go on: each has the answer of one version, or NOT_FOUND.
TEST_F(ResidentEngineTest, LayersThatAreReplacedUnderLoadAnswerAsOneVersionOrNotAtAll) {
  constexpr int kVersions = 3, kCallers = 6, kCycles = 100;
  CpuEngine cpu({.threads = 2, .queue_calls = 1000});
  std::vector<Layer> versions;
  std::map<std::string, Tensor> answers;  // by content hash
  for (int version = 0; version < kVersions; ++version) {
    versions.push_back(SeededSwiGluLayer(version, kDim, kHiddenDim));
    FeedForwardCall call = CallOf("");
    call.spec = std::get<FeedForwardLayer>(versions.back()).spec;
    call.weights = std::get<FeedForwardLayer>(versions.back()).weights;
    answers.emplace(ContentHash(versions.back()), FeedForward(cpu, call)->outputs.output);
  }
  LayerLibrary library({&catalog_}, {.loading_threads = 2});
  ResidentEngine engine(library, cpu);
  std::atomic<bool> over = false;
  std::atomic<int> calls = 0, answered = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      while (!over) {
        const auto result = FeedForward(engine, CallOf(kName));
        if (result.ok()) {
          const auto expected = answers.find(result->layer_hash);
          ASSERT_NE(expected, answers.end());
          EXPECT_TRUE(SameBits(result->outputs.output, expected->second));
          ++answered;
        } else {
          EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound) << result.status();
        }
        ++calls;
      }
    });
  }
  const auto await_calls = [&] {
    for (const int before = calls; calls < before + kCallers;) std::this_thread::yield();
  };
  for (int cycle = 0; cycle < kCycles; ++cycle) {
    catalog_.Put(kName, versions[cycle % kVersions]);
    await_calls();
    if (cycle % 2 == 0) {
      catalog_.Remove(kName);
      await_calls();
    }
  }
  over = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_GT(answered, kCycles);
}

}  // namespace
}  // namespace layerd
