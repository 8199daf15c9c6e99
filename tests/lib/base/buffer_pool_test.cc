#include "lib/base/buffer_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

namespace layerd {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(BufferPoolTest, WhatIsLeftIsUsedAgainForAsMuchAndALittleLess) {
  BufferPool pool(64 * kMiB);
  std::byte* const first = pool.Get(8 * kMiB).get();
  EXPECT_EQ(pool.kept_bytes(), 8 * kMiB);
  EXPECT_EQ(pool.Get(8 * kMiB).get(), first);
  EXPECT_EQ(pool.Get(8 * kMiB - 12345).get(), first);
  EXPECT_NE(pool.Get(8 * kMiB + 1).get(), first);
  EXPECT_NE(pool.Get(4 * kMiB).get(), first) << "half of it would be wasted";
}

TEST(BufferPoolTest, TheBestFitIsTaken) {
  BufferPool pool(64 * kMiB);
  auto large = pool.Get(10 * kMiB), small = pool.Get(9 * kMiB + kMiB / 2);
  std::byte* const best = small.get();
  small.reset();
  large.reset();
  EXPECT_EQ(pool.Get(9 * kMiB + kMiB / 4).get(), best);
}

TEST(BufferPoolTest, NoTwoHaveTheSameAtATime) {
  BufferPool pool(64 * kMiB);
  const auto first = pool.Get(kMiB), second = pool.Get(kMiB);
  EXPECT_NE(first.get(), second.get());
}

TEST(BufferPoolTest, NoMoreIsKeptThanItMay) {
  BufferPool pool(5 * kMiB);
  {
    std::vector<std::shared_ptr<std::byte>> held;
    for (int i = 0; i < 10; ++i) held.push_back(pool.Get(2 * kMiB));
  }
  EXPECT_EQ(pool.kept_bytes(), 4 * kMiB);
  pool.Get(6 * kMiB);
  EXPECT_EQ(pool.kept_bytes(), 0u) << "the oldest go first, and this one cannot be kept";
  BufferPool none(0);
  none.Get(kMiB);
  EXPECT_EQ(none.kept_bytes(), 0u);
}

TEST(BufferPoolTest, ABufferMayOutliveThePool) {
  std::shared_ptr<std::byte> buffer;
  {
    BufferPool pool(64 * kMiB);
    buffer = pool.Get(kMiB);
  }
  std::memset(buffer.get(), 1, kMiB);
}

TEST(BufferPoolTest, BuffersAreAlignedToCacheLines) {
  BufferPool pool(0);
  for (const size_t bytes : {BufferPool::kLeastBytes, kMiB + 1, 4 * kMiB, 5 * kMiB + 3}) {
    const auto buffer = pool.Get(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.get()) % 64, 0u);
    std::memset(buffer.get(), 1, bytes);
  }
}

TEST(BufferPoolTest, ManyThreadsAtOnce) {
  BufferPool pool(4 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 500; ++i) {
        const size_t bytes = kMiB + static_cast<size_t>(i % 7) * 4096;
        const auto buffer = pool.Get(bytes);
        buffer.get()[0] = buffer.get()[bytes - 1] = std::byte(t);
        std::this_thread::yield();
        ASSERT_EQ(buffer.get()[0], std::byte(t));
        ASSERT_EQ(buffer.get()[bytes - 1], std::byte(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(pool.kept_bytes(), 4 * kMiB);
}

}  // namespace
}  // namespace layerd
