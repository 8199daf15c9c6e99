// What the library does with memory, waiting and preloading: lib/resident/prepared_layers.h through LayerLibrary.
#include "lib/resident/prepared_layers.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/resident/layer_library.h"
#include "tests/lib/resident/library_testing.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class PreparedLayersTest : public testing::Test {
 protected:
  MemoryCatalog catalog_;
  Events events_;
};

TEST_F(PreparedLayersTest, WhatWasUsedLongestAgoIsEvicted) {
  for (const char* name : {kA, kB, kC}) catalog_.Put(name, Norm(1));
  LayerLibrary library({&catalog_}, {.memory_bytes = 2 * kNormBytes});
  for (const char* name : {kA, kB, kA, kC}) ASSERT_TRUE(Acquire(library, name).ok());
  EXPECT_TRUE(library.Get(kA)->prepared);
  EXPECT_FALSE(library.Get(kB)->prepared);
  EXPECT_TRUE(library.Get(kC)->prepared);
  EXPECT_EQ(library.Get(kB)->info.content_hash, ContentHash(Norm(1)));  // stays known
  EXPECT_EQ(library.stats().memory_bytes, 2 * kNormBytes);
  EXPECT_EQ(library.stats().evictions, 1);
  EXPECT_EQ(library.stats().preparations, 3);
  ASSERT_TRUE(Acquire(library, kB).ok());
  EXPECT_FALSE(library.Get(kA)->prepared);
}

TEST_F(PreparedLayersTest, WhatIsReadAgainMustBeWhatItWas) {
  const auto record = catalog_.Put(kA, Norm(1));
  catalog_.Put(kB, Norm(2));
  LayerLibrary library({&catalog_}, {.memory_bytes = kNormBytes});
  ASSERT_TRUE(Acquire(library, kA).ok());
  ASSERT_TRUE(Acquire(library, kB).ok());
  record->spoilt = true;
  const absl::Status status = Acquire(library, kA).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(DetailsOf(status).reason, "LAYER_DAMAGED");
  EXPECT_EQ(DetailsOf(status).field, "layer");
  record->spoilt = false;
  EXPECT_EQ((*Acquire(library, kA))->content_hash, ContentHash(Norm(1)));
}

TEST_F(PreparedLayersTest, WhatNoCallUsesIsEvictedBeforeWhatCallsUse) {
  for (const char* name : {kA, kB, kC}) catalog_.Put(name, Norm(1));
  LayerLibrary library({&catalog_}, {.memory_bytes = 2 * kNormBytes});
  const auto used = Acquire(library, kA);
  ASSERT_TRUE(Acquire(library, kB).ok());
  ASSERT_TRUE(Acquire(library, kC).ok());
  EXPECT_TRUE(library.Get(kA)->prepared);
  EXPECT_FALSE(library.Get(kB)->prepared);
}

TEST_F(PreparedLayersTest, WhatCallsUseCountsUntilTheyAreDone) {
  for (const char* name : {kA, kB}) catalog_.Put(name, Norm(1));
  LayerLibrary library({&catalog_}, {.memory_bytes = kNormBytes, .memory_wait = absl::ZeroDuration()});
  auto used = Acquire(library, kA);
  ASSERT_TRUE(used.ok());
  // The bytes of a tensor keep all of its layer.
  const Tensor gamma = *std::get<NormalizeLayer>((*used)->layer).weights.gamma;
  const absl::Status status = Acquire(library, kB).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(status).reason, "OVERLOADED");
  EXPECT_GT(DetailsOf(status).retry_delay_ms.value_or(-1), 0);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--layer_memory_mib"));
  EXPECT_FALSE(library.Get(kA)->prepared);  // had to go, so that its memory comes back
  EXPECT_TRUE(SameBits((*used)->layer, Norm(1)));
  used = absl::CancelledError();
  EXPECT_EQ(library.stats().memory_bytes, kNormBytes);
  EXPECT_EQ(DetailsOf(Acquire(library, kB).status()).reason, "OVERLOADED");
  EXPECT_TRUE(SameBits(gamma, *std::get<NormalizeLayer>(Norm(1)).weights.gamma));
}

TEST_F(PreparedLayersTest, MemoryIsWaitedForUntilACallIsDone) {
  for (const char* name : {kA, kB}) catalog_.Put(name, Norm(1));
  LayerLibrary library({&catalog_}, {.memory_bytes = kNormBytes, .memory_wait = absl::InfiniteDuration()});
  auto used = Acquire(library, kA);
  auto waiting = AcquireLater(library, kB);
  used = absl::CancelledError();
  EXPECT_TRUE(waiting.get().ok());
}

TEST_F(PreparedLayersTest, MemoryIsNotWaitedForBeyondTheDeadline) {
  for (const char* name : {kA, kB}) catalog_.Put(name, Norm(1));
  LayerLibrary library({&catalog_}, {.memory_bytes = kNormBytes, .memory_wait = absl::InfiniteDuration()});
  const auto used = Acquire(library, kA);
  EXPECT_EQ(Acquire(library, kB, absl::Now() + absl::Milliseconds(5)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(PreparedLayersTest, LayersLargerThanAllMemoryAreRefusedForGood) {
  catalog_.Put(kA, Norm(1));
  LayerLibrary library({&catalog_}, {.memory_bytes = kNormBytes - 1});
  const absl::Status status = Acquire(library, kA).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(status).reason, "LAYER_TOO_LARGE");
  EXPECT_EQ(DetailsOf(status).field, "layer");
  EXPECT_EQ(DetailsOf(status).retry_delay_ms, -1);
  EXPECT_EQ(
      status.message(),
      "layer: expected a layer of at most 255 bytes, all that layers may take (--layer_memory_mib), got 256 bytes");
}

TEST_F(PreparedLayersTest, PinnedLayersStayAndWhatDoesNotFitBesideThemIsRefusedForGood) {
  for (const char* name : {kA, kB, kC}) catalog_.Put(name, Norm(1));
  catalog_.Put(kD, SeededNormLayer(1, 2 * kDim));
  LayerLibrary library({&catalog_}, {.memory_bytes = 2 * kNormBytes, .pinned = {"models/*/layers/a"}});
  EXPECT_TRUE(library.Get(kA)->pinned);
  EXPECT_FALSE(library.Get(kB)->pinned);
  for (const char* name : {kA, kB, kC}) ASSERT_TRUE(Acquire(library, name).ok());
  EXPECT_TRUE(library.Get(kA)->prepared);
  EXPECT_FALSE(library.Get(kB)->prepared);
  const absl::Status status = Acquire(library, kD).status();
  EXPECT_EQ(DetailsOf(status).reason, "LAYER_TOO_LARGE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("all that pinned layers leave"));
  EXPECT_TRUE(library.Get(kC)->prepared);  // was not evicted in vain
}

TEST_F(PreparedLayersTest, PreloadTellsWhichPinnedLayersDoNotFit) {
  for (const char* name : {kA, kB}) catalog_.Put(name, Norm(1));
  LayerLibrary library({&catalog_},
                       {.memory_bytes = kNormBytes, .pinned = {"models/m/*"}, .on_event = events_.Listener()});
  library.Preload();
  const auto events = events_.Await(2);
  EXPECT_EQ(events[0].name, kA);
  EXPECT_TRUE(events[0].status.ok());
  EXPECT_TRUE(events[0].ahead);
  EXPECT_EQ(events[0].bytes, kNormBytes);
  EXPECT_EQ(events[1].name, kB);
  EXPECT_EQ(DetailsOf(events[1].status).reason, "LAYER_TOO_LARGE");
  EXPECT_TRUE(library.Get(kA)->prepared);
}

TEST_F(PreparedLayersTest, PreloadFillsTheRoomThatPinnedLayersLeave) {
  for (const char* name : {kA, kB, kC, kD}) catalog_.Put(name, Norm(1));
  LayerLibrary library({&catalog_}, {.memory_bytes = 3 * kNormBytes,
                                     .pinned = {kC},
                                     .preloaded = {"models/m/layers/*"},
                                     .on_event = events_.Listener()});
  library.Preload();
  const auto events = events_.Await(4);
  std::vector<std::string> names;
  for (const auto& event : events) names.push_back(event.name);
  EXPECT_THAT(names, ElementsAre(kC, kA, kB, kD));
  EXPECT_TRUE(events[2].status.ok());
  EXPECT_EQ(events[3].status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(library.stats().evictions, 0);
  // A call gets it all the same, and asking again changes nothing for what is prepared.
  EXPECT_TRUE(Acquire(library, kD).ok());
  EXPECT_EQ(library.stats().evictions, 1);
  EXPECT_TRUE(library.Get(kC)->prepared);
  const int64_t before = library.stats().preparations;
  catalog_.Remove(kA);
  catalog_.Remove(kB);
  catalog_.Put(kC, Norm(2));  // comes anew
  library.Preload();
  EXPECT_EQ(events_.Await(6)[5].name, kC);
  EXPECT_EQ(library.stats().preparations, before + 1);
  EXPECT_TRUE(SameBits((*Acquire(library, kC))->layer, Norm(2)));
}

TEST_F(PreparedLayersTest, ACallThatJoinsAPreloadComesBeforeOthersAndMayEvict) {
  Gate gate;
  auto held = std::make_shared<MemoryRecord>(kD, Norm(1));
  held->before_read = [&] { return gate.Pass(); };
  catalog_.Put(held);
  const auto a = catalog_.Put(kA, Norm(1)), b = catalog_.Put(kB, Norm(2));
  LayerLibrary library({&catalog_},
                       {.memory_bytes = kNormBytes, .preloaded = {kA, kB}, .on_event = events_.Listener()});
  auto first = AcquireLater(library, kD);
  gate.AwaitArrival();
  library.Preload();
  auto joined = AcquireLater(library, kB);
  gate.Open();
  EXPECT_TRUE(first.get().ok());
  const auto layer = joined.get();
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_TRUE(SameBits((*layer)->layer, Norm(2)));
  const auto events = events_.Await(3);
  EXPECT_EQ(events[1].name, kB);
  EXPECT_EQ(events[2].name, kA);
  EXPECT_EQ(events[2].status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(a->reads, 0);
  EXPECT_EQ(b->reads, 1);
}

TEST_F(PreparedLayersTest, NothingIsReadForCallersWhoseDeadlineHasPassed) {
  Gate gate;
  auto held = std::make_shared<MemoryRecord>(kD, Norm(1));
  held->before_read = [&] { return gate.Pass(); };
  catalog_.Put(held);
  const auto late = catalog_.Put(kA, Norm(1)), both = catalog_.Put(kB, Norm(1));
  LayerLibrary library({&catalog_}, {});
  EXPECT_EQ(Acquire(library, kA, absl::InfinitePast()).status().code(), absl::StatusCode::kDeadlineExceeded);
  auto first = AcquireLater(library, kD);
  gate.AwaitArrival();
  const absl::Time deadline = absl::Now() + absl::Milliseconds(2);
  auto one = AcquireLater(library, kA, deadline), two = AcquireLater(library, kB, deadline);
  auto three = AcquireLater(library, kB);
  while (absl::Now() <= deadline) std::this_thread::yield();
  gate.Open();
  EXPECT_TRUE(first.get().ok());
  EXPECT_EQ(DetailsOf(one.get().status()).reason, "EXPIRED_WHILE_WAITING");
  EXPECT_EQ(two.get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(three.get().ok());
  EXPECT_EQ(late->reads, 0);
  EXPECT_EQ(both->reads, 1);
}

TEST_F(PreparedLayersTest, CallsThatWaitAreBounded) {
  Gate gate;
  auto held = std::make_shared<MemoryRecord>(kA, Norm(1));
  held->before_read = [&] { return gate.Pass(); };
  catalog_.Put(held);
  catalog_.Put(kB, Norm(1));
  LayerLibrary library({&catalog_}, {.waiting_calls = 3});
  std::vector<std::future<Prepared>> waiting;
  for (const char* name : {kA, kA, kB}) waiting.push_back(AcquireLater(library, name));
  EXPECT_EQ(DetailsOf(Acquire(library, kB).status()).reason, "OVERLOADED");
  gate.Open();
  for (auto& one : waiting) EXPECT_TRUE(one.get().ok());
  EXPECT_TRUE(Acquire(library, kB).ok());
}

TEST_F(PreparedLayersTest, TheEndAnswersEveryoneAndLayersOutliveIt) {
  Gate gate;
  auto held = std::make_shared<MemoryRecord>(kA, Norm(1));
  held->before_read = [&] { return gate.Pass(); };
  catalog_.Put(held);
  for (int i = 0; i < 20; ++i) catalog_.Put(absl::StrCat(kB, i), Norm(1));
  auto library = std::make_unique<LayerLibrary>(std::vector<LayerCatalog*>{&catalog_}, LayerLibraryOptions{});
  auto first = AcquireLater(*library, kA);
  gate.AwaitArrival();
  std::vector<std::future<Prepared>> queued;
  for (int i = 0; i < 20; ++i) queued.push_back(AcquireLater(*library, absl::StrCat(kB, i)));
  std::thread end([&] { library.reset(); });
  gate.Open();
  const auto layer = first.get();
  for (auto& one : queued) {
    const auto answer = one.get();  // prepared before the end came, or not
    EXPECT_EQ(DetailsOf(answer.status()).reason, answer.ok() ? "" : "DRAINING");
  }
  end.join();
  ASSERT_TRUE(layer.ok());
  EXPECT_TRUE(SameBits((*layer)->layer, Norm(1)));
}

TEST_F(PreparedLayersTest, TheEndDoesNotWaitForMemory) {
  for (const char* name : {kA, kB}) catalog_.Put(name, Norm(1));
  auto library = std::make_unique<LayerLibrary>(
      std::vector<LayerCatalog*>{&catalog_},
      LayerLibraryOptions{.memory_bytes = kNormBytes, .memory_wait = absl::InfiniteDuration()});
  const auto used = Acquire(*library, kA);
  auto waiting = AcquireLater(*library, kB);
  library.reset();
  EXPECT_EQ(waiting.get().status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace layerd
