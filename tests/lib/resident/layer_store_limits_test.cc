// What the system refuses: space, descriptors and memory. Each test sets limits in a process of its own.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/resident/store_files.h"
#include "tests/lib/resident/child_process.h"
#include "tests/lib/resident/store_testing.h"

namespace layerd {
namespace {

constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kInternal = absl::StatusCode::kInternal;
constexpr char kName[] = "models/m/layers/l";

// Sets a limit as long as it lives.
class Limit {
 public:
  Limit(__rlimit_resource_t resource, rlim_t value) : resource_(resource) {
    EXPECT_EQ(getrlimit(resource_, &before_), 0);
    rlimit now = before_;
    now.rlim_cur = value;
    EXPECT_EQ(setrlimit(resource_, &now), 0);
  }
  ~Limit() { EXPECT_EQ(setrlimit(resource_, &before_), 0); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  const __rlimit_resource_t resource_;
  rlimit before_ = {};
};

TEST(LayerStoreLimits, AFullDiskIsSaidAndLeavesNothing) {
  ChildProcess([] {
    // Beyond the limit of a file's size, the system says EFBIG, as it says ENOSPC on a full disk.
    signal(SIGXFSZ, SIG_IGN);
    TemporaryFolder folder;
    const auto store = OpenStore(folder.path());
    const Layer old = SeededNorm(1), layer = SeededNorm(2, 100'000);
    ASSERT_TRUE(Upload(*store, kName, old).ok());
    // A file that fills whole pieces, so that nothing is left to be written at the end.
    std::string bytes = SafetensorsOf(layer);
    bytes = SafetensorsOf(layer, 2 * 262'144 - bytes.size() - 27);
    ASSERT_EQ(bytes.size(), 2u * 262'144u);
    const UploadHeader header = HeaderOf(kName, layer, bytes, ContentHash(old));
    const auto expect_full = [&](const absl::Status& status, const std::string& what) {
      ExpectStoreError(status, kExhausted, "DISK_FULL", "layer_store", {what, "File too large"});
      EXPECT_EQ(DetailsOf(status).retry_delay_ms, -1);
      ExpectLayer(*store, kName, old);
      ExpectNoStrays(folder.path(), *store);
    };
    {
      const Limit size(RLIMIT_FSIZE, bytes.size() - 1);
      expect_full(store->Begin(header).status(), "space for an upload");
    }
    {
      const auto upload = store->Begin(header);
      ASSERT_TRUE(upload.ok()) << upload.status();
      const Limit size(RLIMIT_FSIZE, bytes.size() / 2);
      const auto status = (*upload)->Write(AsBytes(bytes));
      expect_full(status, "an upload cannot be written");
      EXPECT_EQ((*upload)->Commit().status(), status);
    }
    {
      const auto upload = store->Begin(header);
      ASSERT_TRUE(upload.ok()) << upload.status();
      ASSERT_TRUE((*upload)->Write(AsBytes(bytes)).ok());
      const Limit size(RLIMIT_FSIZE, 100);
      expect_full((*upload)->Commit().status(), "a record cannot be written");
    }
    {
      const auto small = store->Begin(HeaderOf("models/new/layers/l", old, SafetensorsOf(old)));
      ASSERT_TRUE(small.ok()) << small.status();
      ASSERT_TRUE((*small)->Write(AsBytes(SafetensorsOf(old))).ok());
      const Limit size(RLIMIT_FSIZE, 50);
      expect_full((*small)->Commit().status(), "an upload cannot be written");
    }
    EXPECT_TRUE(UploadBytes(*store, header, bytes).ok());
    ExpectLayer(*store, kName, layer);
    ExpectNoStrays(folder.path(), *store);
  }).ExpectSuccess();
}

// Leaves room for `count` descriptors as long as it lives.
class DescriptorsLeft {
 public:
  explicit DescriptorsLeft(int count) : limit_(RLIMIT_NOFILE, 64) {
    for (int taken = 0; taken >= 0;) {
      taken = open("/dev/null", O_RDONLY | O_CLOEXEC);
      taken_.emplace_back(taken);
    }
    for (int i = 0; i <= count; ++i) taken_.pop_back();
  }

 private:
  const Limit limit_;
  std::vector<Descriptor> taken_;
};

TEST(LayerStoreLimits, WithoutDescriptorsNothingIsLost) {
  ChildProcess([] {
    TemporaryFolder folder(QuickFolder());
    const auto known = OpenStore(folder.path());
    const Layer one = SeededNorm(1), two = SeededNorm(2), three = SeededNorm(3);
    int refused = 0, done = 0;
    for (int left = 0; left < 10; ++left) {
      ASSERT_TRUE(Upload(*known, "models/kept/layers/l", one).ok());
      ASSERT_TRUE(Upload(*known, kName, two).ok());
      const auto fresh = OpenStore(folder.path());
      std::vector<absl::Status> statuses;
      {
        const DescriptorsLeft descriptors(left);
        // Never NOT_FOUND, and never damaged.
        statuses.push_back(fresh->Find(kName).status());
        statuses.push_back(Upload(*known, kName, three, ContentHash(two)).status());
        statuses.push_back(Upload(*fresh, "models/new/layers/l", three).status());
        statuses.push_back(LayerStore::Open(folder.path(), {}).status());
        statuses.push_back(known->Delete("models/new/layers/l", std::nullopt));
      }
      for (const absl::Status& status : statuses) {
        if (status.ok() || absl::IsNotFound(status)) {
          ++done;
        } else {
          EXPECT_EQ(DetailsOf(status).field, "layer_store") << status;
          ++refused;
        }
      }
      ExpectLayer(*known, "models/kept/layers/l", one);
      ExpectLayer(*fresh, kName, statuses[1].ok() ? three : two);
      // A store that was opened meanwhile may have left what it could not judge; the next one does not.
      for (const std::string& name : NamesIn(*known)) {
        EXPECT_TRUE(known->Find(name).value()->Read().ok()) << name;
        EXPECT_TRUE(fresh->Delete(name, std::nullopt).ok());
      }
      ExpectNoStrays(folder.path(), *known);
    }
    EXPECT_GT(refused, 8);
    EXPECT_GT(done, 8);
  }).ExpectSuccess();
}

TEST(LayerStoreLimits, ARecordThatMayNotBeReadIsListedWithTheFault) {
  ChildProcess([] {
    TemporaryFolder folder(QuickFolder());
    const auto store = OpenStore(folder.path());
    ASSERT_TRUE(Upload(*store, kName, SeededNorm(1)).ok());
    ASSERT_TRUE(Upload(*store, "models/m/layers/other", SeededNorm(2)).ok());
    const std::string record = folder.File("layers/m/l.json");
    folder.Write("layers/m/l.json", ReadWhole(record) + " ");
    ASSERT_EQ(chmod(record.c_str(), 0), 0);
    const uid_t user = geteuid();
    // The superuser may read everything.
    ASSERT_EQ(seteuid(user == 0 ? 65534 : user), 0);
    const auto found = store->Find(kName).status();
    const auto list = store->List();
    ASSERT_EQ(seteuid(user), 0);
    ExpectStoreError(found, kInternal, "STORE_IO", "layer_store", {"Permission denied", "layers/m/l.json"});
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(list[0]->info().name, kName);
    EXPECT_EQ(list[0]->info().status, found);
    EXPECT_TRUE(list[1]->info().status.ok());
    // A fault is not remembered.
    ASSERT_EQ(chmod(record.c_str(), 0600), 0);
    ExpectLayer(*store, kName, SeededNorm(1));
  }).ExpectSuccess();
}

TEST(LayerStoreLimits, ReadSaysWhereMemoryIsMissing) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs the address space";
#endif
  ChildProcess([] {
    TemporaryFolder folder(QuickFolder());
    NormalizeLayer layer = std::get<NormalizeLayer>(SeededNorm(1));
    layer.weights.gamma = Tensor::FromFloats(DType::kFloat32, {10'000'000}, std::vector<float>(10'000'000));
    const auto store = OpenStore(folder.path());
    const auto record = Upload(*store, kName, layer);
    ASSERT_TRUE(record.ok()) << record.status();
    {
      const Limit memory(RLIMIT_DATA, 40'000'000);
      ExpectStoreError((*record)->Read().status(), kExhausted, "OVERLOADED", "");
    }
    EXPECT_TRUE((*record)->Read().ok());
  }).ExpectSuccess();
}

}  // namespace
}  // namespace layerd
