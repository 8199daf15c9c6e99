#include "lib/base/guarded_mapping.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "lib/base/errors.h"
#include "tests/lib/base/temporary_folder.h"

namespace layerd {
namespace {

constexpr int64_t kPageBytes = 4096;

class File {
 public:
  File(const TemporaryFolder& folder, int64_t bytes) : path_(folder.File("file", bytes)) {
    fd_ = open(path_.c_str(), O_RDWR);
  }
  ~File() {
    close(fd_);
    unlink(path_.c_str());
  }
  int fd() const { return fd_; }
  void Resize(int64_t bytes) const { ASSERT_EQ(ftruncate(fd_, bytes), 0); }

 private:
  std::string path_;
  int fd_;
};

char Touch(const std::byte& byte) { return *reinterpret_cast<const volatile char*>(&byte); }

std::unique_ptr<GuardedMapping> MapOf(const File& file, size_t size) {
  auto mapping = GuardedMapping::Map(file.fd(), size);
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  return *std::move(mapping);
}

TEST(GuardedMappingTest, IsTheFile) {
  const TemporaryFolder folder;
  const File file(folder, 10000);
  const auto mapping = MapOf(file, 10000);
  EXPECT_EQ(mapping->size(), 10000u);
  mapping->data()[9999] = std::byte{7};
  char last = 0;
  EXPECT_EQ(pread(file.fd(), &last, 1, 9999), 1);
  EXPECT_EQ(last, 7);
  EXPECT_EQ(pwrite(file.fd(), "x", 1, 5), 1);
  EXPECT_EQ(mapping->data()[5], std::byte{'x'});
  EXPECT_FALSE(mapping->damaged());
}

TEST(GuardedMappingTest, WhatIsCutOffIsReplacedAndTold) {
  const TemporaryFolder folder;
  const File file(folder, 8 * kPageBytes);
  const auto mapping = MapOf(file, 8 * kPageBytes);
  std::memset(mapping->data(), 1, mapping->size());
  file.Resize(2 * kPageBytes);
  EXPECT_FALSE(mapping->damaged());
  EXPECT_EQ(mapping->data()[2 * kPageBytes - 1], std::byte{1});
  EXPECT_FALSE(mapping->damaged());
  Touch(mapping->data()[5 * kPageBytes + 3]);
  EXPECT_TRUE(mapping->damaged());
  mapping->data()[7 * kPageBytes] = std::byte{3};  // is lost
  EXPECT_EQ(mapping->data()[7 * kPageBytes], std::byte{3});
  Touch(mapping->data()[2 * kPageBytes]);  // a second fault, of a page before
  EXPECT_EQ(mapping->data()[0], std::byte{1});
  file.Resize(8 * kPageBytes);
  EXPECT_TRUE(mapping->damaged());
  const auto again = MapOf(file, 8 * kPageBytes);
  EXPECT_FALSE(again->damaged());
  EXPECT_EQ(again->data()[7 * kPageBytes], std::byte{0});
}

TEST(GuardedMappingTest, WritingWhatIsCutOffIsSurvivedToo) {
  const TemporaryFolder folder;
  const File file(folder, 3 * kPageBytes);
  const auto mapping = MapOf(file, 3 * kPageBytes);
  file.Resize(0);
  std::memset(mapping->data(), 5, mapping->size());
  EXPECT_TRUE(mapping->damaged());
}

TEST(GuardedMappingTest, HarmsNoOtherMapping) {
  const TemporaryFolder folder, other_folder;
  const File file(folder, 4 * kPageBytes), other_file(other_folder, 4 * kPageBytes);
  const auto mapping = MapOf(file, 4 * kPageBytes);
  const auto other = MapOf(other_file, 4 * kPageBytes);
  std::memset(other->data(), 9, other->size());
  file.Resize(0);
  Touch(mapping->data()[0]);
  EXPECT_TRUE(mapping->damaged());
  EXPECT_FALSE(other->damaged());
  EXPECT_TRUE(std::all_of(other->data(), other->data() + other->size(), [](std::byte b) { return b == std::byte{9}; }));
}

TEST(GuardedMappingTest, ThreadsThatReadAndWriteWhileItIsCutSurvive) {
  constexpr size_t kBytes = 64 * kPageBytes;
  const TemporaryFolder folder;
  const File file(folder, kBytes);
  std::atomic<int> damaged{0};
  for (int round = 0; round < 50; ++round) {
    file.Resize(kBytes);
    const std::shared_ptr<GuardedMapping> mapping = MapOf(file, kBytes);
    std::atomic<bool> cut{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([mapping, &cut, t] {
        // One more pass after it was cut, so that each has met the hole.
        for (bool last = false; !last;) {
          last = cut.load();
          for (size_t i = static_cast<size_t>(t); i < kBytes; i += 1024) {
            auto* at = reinterpret_cast<std::atomic<char>*>(mapping->data() + i);
            if (t == 0) at->load(std::memory_order_relaxed);
            if (t != 0) at->store(1, std::memory_order_relaxed);
          }
        }
      });
    }
    file.Resize((round % 8) * kPageBytes);
    cut = true;
    for (std::thread& thread : threads) thread.join();
    damaged += mapping->damaged() ? 1 : 0;
  }
  EXPECT_EQ(damaged, 50);
}

// Mappings come and go while another one is damaged: each fault finds its own.
TEST(GuardedMappingTest, OthersComeAndGoMeanwhile) {
  const TemporaryFolder folder, other_folder;
  const File file(folder, 4 * kPageBytes), other_file(other_folder, kPageBytes);
  std::atomic<bool> stop{false};
  std::thread others([&] {
    while (!stop) {
      for (int i = 0; i < 10; ++i) MapOf(other_file, kPageBytes)->data()[0] = std::byte{1};
    }
  });
  for (int round = 0; round < 300; ++round) {
    file.Resize(4 * kPageBytes);
    const auto mapping = MapOf(file, 4 * kPageBytes);
    file.Resize(0);
    Touch(mapping->data()[kPageBytes]);
    ASSERT_TRUE(mapping->damaged());
  }
  stop = true;
  others.join();
}

TEST(GuardedMappingTest, MoreThanTheTableHoldsAreRefused) {
  const TemporaryFolder folder;
  const File file(folder, kPageBytes);
  std::vector<std::unique_ptr<GuardedMapping>> all;
  for (int i = 0; i < GuardedMapping::kMostMappings; ++i) {
    all.push_back(MapOf(file, kPageBytes));
    ASSERT_NE(all.back(), nullptr);
  }
  const auto status = GuardedMapping::Map(file.fd(), kPageBytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(status).reason, "OVERLOADED");
  file.Resize(0);
  Touch(all.back()->data()[0]);
  EXPECT_TRUE(all.back()->damaged());
  all.pop_back();
  EXPECT_TRUE(GuardedMapping::Map(file.fd(), kPageBytes).ok());
}

// A file of 8 GiB that has never had memory: nobody can make this process need as much by cutting it off.
TEST(GuardedMappingTest, WhatStandsInForMuchIsLittle) {
  constexpr size_t kBytes = size_t{8} << 30;
  const TemporaryFolder folder;
  const File file(folder, kPageBytes);
  file.Resize(kBytes);
  const auto mapping = MapOf(file, kBytes);
  file.Resize(0);
  for (size_t at = 0; at < kBytes; at += size_t{2} << 20) mapping->data()[at] = std::byte{1};
  EXPECT_TRUE(mapping->damaged());
  // 64 MiB later it is the same memory.
  mapping->data()[kPageBytes] = std::byte{7};
  EXPECT_EQ(mapping->data()[kPageBytes + (size_t{64} << 20)], std::byte{7});
  EXPECT_EQ(mapping->data()[kPageBytes + (size_t{127} << 26)], std::byte{7});
}

TEST(GuardedMappingTest, MoreBytesThanCanBeReplacedAreRefused) {
  const TemporaryFolder folder;
  const File file(folder, kPageBytes);
  const auto status = GuardedMapping::Map(file.fd(), GuardedMapping::kMostBytes + 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  const auto half = MapOf(file, GuardedMapping::kMostBytes / 2);
  const auto rest = MapOf(file, GuardedMapping::kMostBytes / 2);
  EXPECT_FALSE(GuardedMapping::Map(file.fd(), 1).ok());
}

TEST(GuardedMappingTest, HugePagesAreReplacedAsAWhole) {
  constexpr size_t kHugeBytes = size_t{2} << 20;
  const int fd = memfd_create("huge", MFD_HUGETLB | MFD_HUGE_2MB);
  if (fd < 0 || ftruncate(fd, 2 * kHugeBytes) != 0) GTEST_SKIP() << "the system has no huge pages of 2 MiB";
  auto mapping = GuardedMapping::Map(fd, 2 * kHugeBytes);
  if (!mapping.ok()) GTEST_SKIP() << "the system has no free huge pages: " << mapping.status();
  (*mapping)->data()[0] = std::byte{1};
  ASSERT_EQ(ftruncate(fd, kHugeBytes), 0);
  Touch((*mapping)->data()[kHugeBytes + 5000]);
  EXPECT_TRUE((*mapping)->damaged());
  EXPECT_EQ((*mapping)->data()[0], std::byte{1});
  Touch((*mapping)->data()[2 * kHugeBytes - 1]);
  close(fd);
}

using GuardedMappingDeathTest = testing::Test;

TEST(GuardedMappingDeathTest, AFaultElsewhereStillEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const TemporaryFolder folder;
  const File file(folder, kPageBytes);
  const auto mapping = MapOf(file, kPageBytes);
  EXPECT_DEATH(
      {
        void* unguarded = mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED, file.fd(), 0);
        file.Resize(0);
        static_cast<volatile char*>(unguarded)[0];
      },
      "");
}

TEST(GuardedMappingDeathTest, ASignalThatWasSentStillEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const TemporaryFolder folder;
  const File file(folder, kPageBytes);
  const auto mapping = MapOf(file, kPageBytes);
  EXPECT_DEATH(
      {
        kill(getpid(), SIGBUS);
        pause();
      },
      "");
}

TEST(GuardedMappingDeathTest, AMappingThatIsGoneIsNotGuarded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const TemporaryFolder folder;
  const File file(folder, kPageBytes);
  EXPECT_DEATH(
      {
        std::byte* const at = MapOf(file, kPageBytes)->data();
        void* unguarded = mmap(at, kPageBytes, PROT_READ, MAP_SHARED | MAP_FIXED, file.fd(), 0);
        file.Resize(0);
        static_cast<volatile char*>(unguarded)[0];
      },
      "");
}

}  // namespace
}  // namespace layerd
