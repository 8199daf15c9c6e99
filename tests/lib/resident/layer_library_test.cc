#include "lib/resident/layer_library.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/lib/resident/library_testing.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;

class LayerLibraryTest : public testing::Test {
 protected:
  MemoryCatalog catalog_;
  Events events_;
};

TEST_F(LayerLibraryTest, GivesALayerWithItsHashAndReadsItOnce) {
  const Layer layer = SeededSwiGluLayer(1, 8, 12);
  const auto record = catalog_.Put(kA, layer);
  LayerLibrary library({&catalog_}, {});
  const auto first = Acquire(library, kA);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*first)->name, kA);
  EXPECT_TRUE(SameBits(LayerOf(**first), layer));
  EXPECT_EQ((*first)->content_hash, ContentHash(layer));
  EXPECT_EQ((*first)->extent.hidden_dim, 12);
  EXPECT_EQ(library.stats().memory_bytes, (*first)->memory_bytes);
  EXPECT_EQ(library.stats().prepared, 1);

  catalog_.finds = 0;
  const auto second = Acquire(library, kA);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(*second, *first);
  EXPECT_EQ(record->reads, 1);
  EXPECT_EQ(catalog_.finds, 1);
}

TEST_F(LayerLibraryTest, WhatIsPreparedIsGivenOnTheCallersThread) {
  catalog_.Put(kA, Norm(1));
  LayerLibrary library({&catalog_}, {});
  ASSERT_TRUE(Acquire(library, kA).ok());
  std::thread::id thread;
  library.Acquire(kA, absl::InfinitePast(), [&](const Prepared& layer) {
    EXPECT_TRUE(layer.ok());
    thread = std::this_thread::get_id();
  });
  EXPECT_EQ(thread, std::this_thread::get_id());
}

TEST_F(LayerLibraryTest, AKnownHashIsTaken) {
  auto record = std::make_shared<MemoryRecord>(kA, Norm(1));
  record->mutable_info().content_hash = "of the store";
  catalog_.Put(record);
  LayerLibrary library({&catalog_}, {});
  EXPECT_EQ((*Acquire(library, kA))->content_hash, "of the store");
  EXPECT_EQ(library.Get(kA)->info.content_hash, "of the store");
}

TEST_F(LayerLibraryTest, WhatThereIsNotIsNotFound) {
  LayerLibrary library({&catalog_}, {});
  for (const char* name : {"models/m/layers/none", "", "m", "models/../layers/x"}) {
    const absl::Status status = Acquire(library, name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(DetailsOf(status).reason, "LAYER_NOT_FOUND");
    EXPECT_EQ(DetailsOf(status).field, "layer");
    EXPECT_EQ(DetailsOf(library.Get(name).status()).field, "name");
  }
}

TEST_F(LayerLibraryTest, TheFirstCatalogueThatHasANameAnswers) {
  MemoryCatalog second;
  catalog_.Put(kA, Norm(1));
  second.Put(kA, Norm(2));
  second.Put(kB, Norm(3));
  LayerLibrary library({&catalog_, &second}, {});
  EXPECT_TRUE(SameBits((*Acquire(library, kA))->layer, Norm(1)));
  EXPECT_TRUE(SameBits((*Acquire(library, kB))->layer, Norm(3)));
  EXPECT_EQ(library.List({})->layers.size(), 2u);
  catalog_.Remove(kA);
  EXPECT_TRUE(SameBits((*Acquire(library, kA))->layer, Norm(2)));
}

TEST_F(LayerLibraryTest, ManyCallersOfOneLayerCauseOneRead) {
  Gate gate;
  auto record = std::make_shared<MemoryRecord>(kA, Norm(1));
  record->before_read = [&] { return gate.Pass(); };
  catalog_.Put(record);
  LayerLibrary library({&catalog_}, {.loading_threads = 3});
  std::vector<std::future<Prepared>> waiting;
  waiting.push_back(AcquireLater(library, kA));
  gate.AwaitArrival();
  for (int i = 0; i < 20; ++i) waiting.push_back(AcquireLater(library, kA));
  gate.Open();
  const auto first = waiting.front().get();
  ASSERT_TRUE(first.ok()) << first.status();
  for (size_t i = 1; i < waiting.size(); ++i) EXPECT_EQ(*waiting[i].get(), *first);
  EXPECT_EQ(record->reads, 1);
}

TEST_F(LayerLibraryTest, FailuresAreGivenToAllWhoWaitAndAreNotKept) {
  Gate gate;
  std::atomic<bool> fail = true;
  auto record = std::make_shared<MemoryRecord>(kA, Norm(1));
  record->before_read = [&] {
    (void)gate.Pass();
    return fail ? WithDetails(absl::StatusCode::kFailedPrecondition, "the file is shorter", {.reason = "LAYER_DAMAGED"})
                : absl::OkStatus();
  };
  catalog_.Put(record);
  LayerLibrary library({&catalog_}, {.on_event = events_.Listener()});
  auto one = AcquireLater(library, kA), two = AcquireLater(library, kA);
  gate.Open();
  for (auto* waiting : {&one, &two}) {
    const absl::Status status = waiting->get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(), "layer: the file is shorter");
    EXPECT_EQ(DetailsOf(status).reason, "LAYER_DAMAGED");
    EXPECT_EQ(DetailsOf(status).field, "layer");
  }
  EXPECT_EQ(events_.Await(1)[0].status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(library.stats().memory_bytes, 0);
  fail = false;
  EXPECT_TRUE(Acquire(library, kA).ok());
}

TEST_F(LayerLibraryTest, UnusableLayersSayWhyAndAreNotRead) {
  auto record = std::make_shared<MemoryRecord>(kA, Norm(1));
  record->mutable_info().status = WithDetails(absl::StatusCode::kFailedPrecondition, "file: no activation is known",
                                              {.reason = "OPTIONS_OPEN", .field = "file"});
  catalog_.Put(record);
  LayerLibrary library({&catalog_}, {.preloaded = {"*"}, .on_event = events_.Listener()});
  const absl::Status status = Acquire(library, kA).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "layer: file: no activation is known");
  EXPECT_EQ(DetailsOf(status).reason, "OPTIONS_OPEN");
  EXPECT_EQ(DetailsOf(status).field, "layer");
  EXPECT_EQ(record->reads, 0);
  EXPECT_EQ(library.Get(kA)->info.status, record->info().status);

  library.Preload();
  const auto events = events_.Await(1);
  EXPECT_EQ(events[0].name, kA);
  EXPECT_EQ(events[0].status, record->info().status);
}

TEST_F(LayerLibraryTest, AReplacedLayerAnswersAtOnceAndTheOldOneStaysWithItsCalls) {
  catalog_.Put(kA, Norm(1));
  LayerLibrary library({&catalog_}, {});
  auto old = Acquire(library, kA);
  catalog_.Put(kA, Norm(2));
  EXPECT_FALSE(library.Get(kA)->prepared);
  EXPECT_EQ(library.Get(kA)->info.content_hash, "");
  const auto replaced = Acquire(library, kA);
  ASSERT_TRUE(replaced.ok());
  EXPECT_TRUE(SameBits((*replaced)->layer, Norm(2)));
  EXPECT_TRUE(SameBits((*old)->layer, Norm(1)));
  EXPECT_EQ(library.stats().memory_bytes, 2 * kNormBytes);
  EXPECT_EQ(library.stats().prepared, 1);
  old = absl::CancelledError();
  EXPECT_EQ(library.stats().memory_bytes, kNormBytes);
}

TEST_F(LayerLibraryTest, ADeletedLayerIsNotFoundAndItsMemoryIsFree) {
  catalog_.Put(kA, Norm(1));
  LayerLibrary library({&catalog_}, {});
  ASSERT_TRUE(Acquire(library, kA).ok());
  catalog_.Remove(kA);
  EXPECT_EQ(Acquire(library, kA).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(library.stats().memory_bytes, 0);

  // Preload() finds out too, when nobody asks.
  catalog_.Put(kA, Norm(1));
  ASSERT_TRUE(Acquire(library, kA).ok());
  catalog_.Remove(kA);
  library.Preload();
  EXPECT_EQ(library.stats().memory_bytes, 0);
}

TEST_F(LayerLibraryTest, AVersionThatGoesWhileItIsReadGivesWayToTheNextOne) {
  auto record = std::make_shared<MemoryRecord>(kA, Norm(1));
  record->before_read = [this] {
    catalog_.Put(kA, Norm(2));
    return absl::OkStatus();
  };
  catalog_.Put(record);
  LayerLibrary library({&catalog_}, {});
  const auto layer = Acquire(library, kA);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_TRUE(SameBits((*layer)->layer, Norm(2)));

  auto deleted = std::make_shared<MemoryRecord>(kB, Norm(1));
  deleted->before_read = [this] {
    catalog_.Remove(kB);
    return absl::OkStatus();
  };
  catalog_.Put(deleted);
  EXPECT_EQ(Acquire(library, kB).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(LayerLibraryTest, AVersionThatIsAlwaysGoneIsGivenUp) {
  const auto record = catalog_.Put(kA, Norm(1));
  record->gone = true;
  LayerLibrary library({&catalog_}, {});
  const absl::Status status = Acquire(library, kA).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GT(DetailsOf(status).retry_delay_ms.value_or(-1), 0);
  EXPECT_EQ(record->reads, 5);
}

TEST_F(LayerLibraryTest, ListsInPagesThatLayersWhichComeAndGoDoNotMove) {
  MemoryCatalog second;
  catalog_.Put("models/b/layers/1", Norm(1));
  catalog_.Put("models/a/layers/2", SeededSwiGluLayer(1, 8, 12));
  catalog_.Put("models/a-b/layers/1", Norm(1));
  second.Put("models/a/layers/1", Norm(1));
  second.Put("models/warned/layers/1", Norm(1));
  LayerLibrary library({&catalog_, &second}, {});
  ASSERT_TRUE(Acquire(library, "models/b/layers/1").ok());

  const auto names = [&](const LayerQuery& query) {
    std::vector<std::string> result;
    const auto page = library.List(query);
    if (!page.ok()) return std::vector<std::string>{page.status().ToString()};
    for (const auto& layer : page->layers) result.push_back(layer.info.name);
    return result;
  };
  EXPECT_THAT(names({}), ElementsAre("models/a-b/layers/1", "models/a/layers/1", "models/a/layers/2",
                                     "models/b/layers/1", "models/warned/layers/1"));
  EXPECT_THAT(names({.model = "a"}), ElementsAre("models/a/layers/1", "models/a/layers/2"));
  EXPECT_THAT(names({.model = "a", .filter = "kind:feed_forward"}), ElementsAre("models/a/layers/2"));
  EXPECT_THAT(names({.filter = "state:prepared"}), ElementsAre("models/b/layers/1"));
  EXPECT_THAT(names({.model = "none"}), ElementsAre());
  EXPECT_EQ(library.List({})->layers[4].warning, "old files");
  EXPECT_EQ(library.List({})->layers[3].info.content_hash, ContentHash(Norm(1)));
  EXPECT_EQ(library.Get("models/warned/layers/1")->warning, "old files");

  LayerQuery query{.filter = "1", .page_size = 2};
  auto page = library.List(query);
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(page->layers.back().info.name, "models/a/layers/1");
  second.Remove("models/a/layers/1");
  catalog_.Put("models/a/layers/0", Norm(1));
  query.page_token = page->next_page_token;
  page = library.List(query);
  ASSERT_TRUE(page.ok()) << page.status();
  ASSERT_EQ(page->layers.size(), 2u);
  EXPECT_EQ(page->layers.front().info.name, "models/b/layers/1");
  EXPECT_EQ(page->next_page_token, "");  // exactly full, and the last one

  query.filter = "2";
  EXPECT_EQ(DetailsOf(library.List(query).status()).field, "page_token");
  EXPECT_EQ(DetailsOf(library.List({.filter = "a:b"}).status()).field, "filter");
  EXPECT_EQ(DetailsOf(library.List({.page_size = -1}).status()).field, "page_size");
}

// Many callers, with memory for a few layers only, while layers are replaced, deleted, listed and preloaded: whoever gets
// a layer has all of one version.
TEST_F(LayerLibraryTest, UnderLoadEveryLayerIsWholeAndOfOneVersion) {
  constexpr int kLayers = 6, kVersions = 4, kCallers = 8, kCalls = 300;
  const auto name = [](int layer) { return absl::StrCat("models/m/layers/", layer); };
  std::map<std::string, std::vector<std::string>> hashes;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int version = 0; version < kVersions; ++version) {
      hashes[name(layer)].push_back(ContentHash(Norm(10 * layer + version)));
    }
    catalog_.Put(name(layer), Norm(10 * layer));
  }
  std::atomic<int> wrong = 0, given = 0, callers_left = kCallers;
  {
    LayerLibrary library({&catalog_}, {.memory_bytes = 3 * kNormBytes,
                                       .loading_threads = 2,
                                       .pinned = {name(0)},
                                       .preloaded = {name(1)},
                                       .on_event = [](const PreparationEvent&) {}});
    std::vector<std::thread> threads;
    for (int caller = 0; caller < kCallers; ++caller) {
      threads.emplace_back([&, caller] {
        for (int i = 0; i < kCalls; ++i) {
          const std::string asked = name((i * 7 + caller * caller) % kLayers);
          const auto layer = Acquire(library, asked, i % 10 == 0 ? absl::Now() : absl::InfiniteFuture());
          if (layer.ok()) {
            const auto& of_name = hashes[asked];
            const std::string& hash = (*layer)->content_hash;
            if (std::find(of_name.begin(), of_name.end(), hash) == of_name.end()) ++wrong;
            if (ContentHash((*layer)->layer) != hash) ++wrong;
            ++given;
          } else if (const auto code = layer.status().code(); code != absl::StatusCode::kNotFound &&
                                                              code != absl::StatusCode::kResourceExhausted &&
                                                              code != absl::StatusCode::kDeadlineExceeded) {
            ADD_FAILURE() << layer.status();
          }
        }
        --callers_left;
      });
    }
    threads.emplace_back([&] {
      for (int i = 0; callers_left > 0; ++i) {
        const int layer = i % kLayers;
        if (i % 5 == 4) catalog_.Remove(name(layer));
        catalog_.Put(name(layer), Norm(10 * layer + i % kVersions));
        std::this_thread::yield();
      }
    });
    threads.emplace_back([&] {
      while (callers_left > 0) {
        library.Preload();
        EXPECT_TRUE(library.List({.filter = "state:prepared"}).ok());
        std::this_thread::yield();
      }
    });
    for (std::thread& thread : threads) thread.join();
    EXPECT_LE(library.stats().memory_bytes, 3 * kNormBytes);
    EXPECT_GT(library.stats().preparations, kLayers);
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(given, 0);
}

}  // namespace
}  // namespace layerd
