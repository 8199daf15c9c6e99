// Batches for which memory cannot be had: a program of its own, since it refuses memory.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "lib/base/errors.h"
#include "lib/engine/batching_engine.h"
#include "lib/layers/seeded.h"
#include "tests/lib/engine/held_engine.h"

namespace {

std::atomic<size_t> refused_bytes = 0;  // aligned memory of just this size, which tensors ask for, is not to be had
std::atomic<int> refusals = 0;

}  // namespace

void* operator new(size_t size, std::align_val_t alignment) {
  const size_t step = static_cast<size_t>(alignment);
  void* const memory = size == refused_bytes ? nullptr : std::aligned_alloc(step, (size + step - 1) / step * step);
  if (memory != nullptr) return memory;
  ++refusals;
  throw std::bad_alloc();
}
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace layerd {
namespace {

constexpr int64_t kDim = 16;
constexpr size_t kRowBytes = kDim * sizeof(float);

class BatchingMemoryTest : public testing::Test {
 protected:
  BatchingMemoryTest() {
    const Arena arena(1);
    const FeedForwardSpec spec = SwiGluSpec();
    layer_ = std::make_shared<const PackedFeedForward>(PackedFeedForward::Of(
        arena, spec, SeededFeedForwardWeights(1, spec, DType::kFloat32, kDim, 24, /*biases=*/false)));
  }
  ~BatchingMemoryTest() override { refused_bytes = 0; }

  std::shared_ptr<std::optional<absl::StatusOr<FeedForwardResult>>> Send(int64_t rows) {
    FeedForwardCall call;
    call.spec = layer_->spec();
    call.weights = layer_->outline();
    call.packed = layer_;
    call.input = SeededInput(1, DType::kFloat32, {rows, kDim});
    auto answer = std::make_shared<std::optional<absl::StatusOr<FeedForwardResult>>>();
    engine_.FeedForward(std::move(call), [answer](absl::StatusOr<FeedForwardResult> result) {
      EXPECT_FALSE(answer->has_value()) << "answered twice";
      *answer = std::move(result);
    });
    return answer;
  }

  std::shared_ptr<const PackedFeedForward> layer_;
  HeldEngine inner_;
  BatchingEngine engine_{{.workers = 1, .sizes = {.batch_rows = 32, .least_part_work = 0}}, inner_};
};

TEST_F(BatchingMemoryTest, CallsWhoseJointInputCannotBeHadAreComputedOneByOne) {
  const auto first = Send(1);
  std::vector answers = {Send(7), Send(8), Send(9)};
  refused_bytes = 24 * kRowBytes;
  refusals = 0;
  EXPECT_EQ(inner_.Answer(), "1x16");
  EXPECT_EQ(refusals, 1);
  for (const char* rows : {"7x16", "8x16", "9x16"}) EXPECT_EQ(inner_.Answer(), rows);
  for (const auto& answer : answers) EXPECT_TRUE(answer->has_value() && (*answer)->ok());
  EXPECT_TRUE((*first)->ok());
  EXPECT_EQ(inner_.count(), 0);
}

TEST_F(BatchingMemoryTest, ADividedCallWhoseAnswerCannotBeHadIsToldSoOnce) {
  const auto answer = Send(40);
  refused_bytes = 40 * kRowBytes;
  refusals = 0;
  EXPECT_EQ(inner_.Answer(), "32x16");
  EXPECT_EQ(refusals, 1);
  ASSERT_TRUE(answer->has_value());
  EXPECT_EQ(answer->value().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(answer->value().status()).reason, "OVERLOADED");
  EXPECT_EQ(inner_.count(), 0);
}

}  // namespace
}  // namespace layerd
