// Several stores over one folder: in one process, in several, and under load.
#include <sys/file.h>
#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/resident/store_files.h"
#include "tests/lib/resident/child_process.h"
#include "tests/lib/resident/store_testing.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kName[] = "models/m/layers/l";

TEST(LayerStoreSharing, EachStoreSeesTheOthersChangesAtOnce) {
  TemporaryFolder folder;
  const auto a = OpenStore(folder.path()), b = OpenStore(folder.path());
  const Layer one = SeededNorm(1), two = SeededNorm(2);
  EXPECT_EQ(b->Find(kName).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(Upload(*a, kName, one).ok());
  ExpectLayer(*b, kName, one);
  const auto old = b->Find(kName);
  EXPECT_EQ(*b->Find(kName), *old);
  EXPECT_EQ(Upload(*b, kName, two).status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(Upload(*a, kName, two, ContentHash(one)).ok());
  ExpectLayer(*b, kName, two);
  EXPECT_EQ((*old)->Read().status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(b->Delete(kName, ContentHash(one)).code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(b->Delete(kName, ContentHash(two)).ok());
  EXPECT_EQ(a->Find(kName).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(NamesIn(*a), IsEmpty());
  ASSERT_TRUE(Upload(*b, "models/n/layers/x", one).ok());
  EXPECT_THAT(NamesIn(*a), ElementsAre("models/n/layers/x"));
  ExpectNoStrays(folder.path(), *a);
}

TEST(LayerStoreSharing, AnotherProcessIsSeenAtOnce) {
  TemporaryFolder folder;
  const auto store = OpenStore(folder.path());
  const Layer one = SeededNorm(1), two = SeededNorm(2);
  ChildProcess([&] { EXPECT_TRUE(Upload(*OpenStore(folder.path()), kName, one).ok()); }).ExpectSuccess();
  ExpectLayer(*store, kName, one);
  const auto old = store->Find(kName);
  ChildProcess([&] {
    EXPECT_TRUE(Upload(*OpenStore(folder.path()), kName, two, ContentHash(one)).ok());
  }).ExpectSuccess();
  EXPECT_EQ((*old)->Read().status().code(), absl::StatusCode::kNotFound);
  ExpectLayer(*store, kName, two);
  ChildProcess([&] { EXPECT_TRUE(OpenStore(folder.path())->Delete(kName, std::nullopt).ok()); }).ExpectSuccess();
  EXPECT_EQ(store->Find(kName).status().code(), absl::StatusCode::kNotFound);
  ExpectNoStrays(folder.path(), *store);
}

TEST(LayerStoreSharing, TheUploadOfALivingProcessIsLeftAlone) {
  TemporaryFolder folder;
  const Layer layer = SeededNorm(1, 1000);
  const std::string bytes = SafetensorsOf(layer);
  Pipe begun, go_on;
  ChildProcess child([&] {
    const auto store = OpenStore(folder.path());
    const auto upload = store->Begin(HeaderOf(kName, layer, bytes));
    ASSERT_TRUE(upload.ok());
    ASSERT_TRUE((*upload)->Write(AsBytes(bytes.substr(0, 1000))).ok());
    begun.Send('b');
    EXPECT_EQ(go_on.Receive(), 'g');
    ASSERT_TRUE((*upload)->Write(AsBytes(bytes.substr(1000))).ok());
    EXPECT_TRUE((*upload)->Commit().ok());
  });
  ASSERT_EQ(begun.Receive(), 'b');
  const auto size = static_cast<int64_t>(bytes.size());
  const auto store = OpenStore(folder.path(), 2 * size - 1);
  EXPECT_THAT(FilesIn(folder.File("uploads")), SizeIs(1));
  EXPECT_THAT(NamesIn(*store), IsEmpty());
  // All of its announced bytes count.
  EXPECT_EQ(store->Begin(HeaderOf("models/m/layers/x", layer, bytes)).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(FilesIn(folder.File("uploads")), SizeIs(1));
  go_on.Send('g');
  child.ExpectSuccess();
  ExpectLayer(*store, kName, layer);
  ExpectNoStrays(folder.path(), *store);
}

TEST(LayerStoreSharing, ALockOfAnotherProcessIsWaitedFor) {
  TemporaryFolder folder;
  const auto store = OpenStore(folder.path());
  void* shared = mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* unlocked = new (shared) std::atomic<bool>(false);
  Pipe locked, go_on;
  ChildProcess child([&] {
    const auto files = StoreFiles::Open(folder.path());
    ASSERT_TRUE(files.ok());
    {
      const auto lock = (*files)->Acquire();
      ASSERT_TRUE(lock.ok());
      locked.Send('l');
      EXPECT_EQ(go_on.Receive(), 'g');
      *unlocked = true;
    }
  });
  ASSERT_EQ(locked.Receive(), 'l');
  // Readers wait for nobody.
  EXPECT_EQ(store->Find(kName).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(NamesIn(*store), IsEmpty());
  std::thread writer([&] {
    EXPECT_TRUE(Upload(*store, kName, SeededNorm(1)).ok());
    EXPECT_TRUE(*unlocked);
  });
  go_on.Send('g');
  writer.join();
  child.ExpectSuccess();
  munmap(shared, sizeof(std::atomic<bool>));
}

TEST(LayerStoreSharing, ManyWritersOfManyStoresDoNotDisturbEachOther) {
  TemporaryFolder folder(QuickFolder());
  const auto a = OpenStore(folder.path()), b = OpenStore(folder.path());
  // Each thread has names of its own; all have the same few weights.
  const auto write = [&](LayerStore& store, int thread) {
    for (int round = 0; round < 25; ++round) {
      const Layer layer = SeededNorm(static_cast<uint64_t>(round % 3));
      const std::string name = absl::StrCat("models/m", thread % 2, "/layers/", thread);
      const auto record = Upload(store, name, layer);
      ASSERT_TRUE(record.ok()) << record.status();
      ExpectLayer(store, name, layer);
      ASSERT_TRUE(store.Delete(name, ContentHash(layer)).ok());
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] { write(thread % 2 == 0 ? *a : *b, thread); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(NamesIn(*a), IsEmpty());
  ExpectNoStrays(folder.path(), *a);
}

// Looks the layer up and reads it, again and again, the last time after `stop`.
void ReadUntil(const std::atomic<bool>& stop, LayerStore& store, const std::string& one, const std::string& two) {
  for (bool last = false; !last;) {
    last = stop;
    const auto record = store.Find(kName);
    if (!record.ok()) {
      ASSERT_EQ(record.status().code(), absl::StatusCode::kNotFound) << record.status();
      ASSERT_FALSE(last);
      continue;
    }
    const LayerInfo& info = (*record)->info();
    ASSERT_TRUE(info.status.ok()) << info.status;
    ASSERT_TRUE(info.content_hash == one || info.content_hash == two);
    const auto layer = (*record)->Read();
    if (layer.ok()) {
      ASSERT_EQ(ContentHash(*layer), info.content_hash);
    } else {
      ASSERT_EQ(layer.status().code(), absl::StatusCode::kNotFound) << layer.status();
      ASSERT_FALSE(last);
    }
    ASSERT_LE(store.List().size(), 1u);
  }
}

TEST(LayerStoreSharing, AThousandCyclesUnderLoadGiveOneVersionOrNone) {
  TemporaryFolder folder(QuickFolder());
  const auto a = OpenStore(folder.path()), b = OpenStore(folder.path());
  const Layer one = SeededNorm(1, 300), two = SeededNorm(2, 300);
  const std::string one_hash = ContentHash(one), two_hash = ContentHash(two);
  std::atomic<bool> stop{false};
  std::thread reads_a([&] { ReadUntil(stop, *a, one_hash, two_hash); });
  std::thread reads_b([&] { ReadUntil(stop, *b, one_hash, two_hash); });
  [&] {
    for (int cycle = 0; cycle < 1000; ++cycle) {
      const bool odd = cycle % 2 == 1;
      const auto uploaded = Upload(*a, kName, odd ? one : two);
      ASSERT_TRUE(uploaded.ok()) << uploaded.status();
      const auto seen = b->Find(kName);
      ASSERT_TRUE(seen.ok()) << seen.status();
      ASSERT_EQ((*seen)->info().content_hash, odd ? one_hash : two_hash) << cycle;
      if (cycle % 3 == 0) {  // by another upload, rather than by nothing
        ASSERT_TRUE(Upload(*b, kName, odd ? two : one, odd ? one_hash : two_hash).ok());
        ASSERT_EQ((*a->Find(kName))->info().content_hash, odd ? two_hash : one_hash) << cycle;
      }
      ASSERT_TRUE(b->Delete(kName, std::nullopt).ok());
      ASSERT_EQ(a->Find(kName).status().code(), absl::StatusCode::kNotFound);
    }
    ASSERT_TRUE(Upload(*a, kName, one).ok());
  }();
  stop = true;
  reads_a.join();
  reads_b.join();
  ExpectLayer(*b, kName, one);
  ExpectNoStrays(folder.path(), *a);
}

}  // namespace
}  // namespace layerd
