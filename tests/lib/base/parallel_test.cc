#include "lib/base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace layerd {
namespace {

// The ranges that For() called its body with, in order of their beginnings.
std::vector<std::pair<int64_t, int64_t>> Ranges(const Arena& arena, int64_t n, int64_t grain) {
  std::mutex mutex;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  arena.For(n, grain, [&](int64_t begin, int64_t end) {
    std::lock_guard<std::mutex> lock(mutex);
    ranges.emplace_back(begin, end);
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

TEST(ArenaTest, CoversTheRangeExactlyOnceInPiecesOfAtLeastTheGrain) {
  for (int threads : {1, 2, 3, 8}) {
    const Arena arena(threads);
    EXPECT_EQ(arena.threads(), threads);
    for (int64_t n : {1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 1001, 100000}) {
      for (int64_t grain : {1, 2, 3, 16, 64, 1000}) {
        const auto ranges = Ranges(arena, n, grain);
        int64_t next = 0;
        for (size_t i = 0; i < ranges.size(); ++i) {
          EXPECT_EQ(ranges[i].first, next);
          if (i + 1 < ranges.size()) {
            EXPECT_GE(ranges[i].second - ranges[i].first, grain);
          }
          next = ranges[i].second;
        }
        EXPECT_EQ(next, n) << "threads " << threads << " grain " << grain;
        EXPECT_LE(ranges.size(), static_cast<size_t>(std::max<int64_t>(1, n / grain)));
      }
    }
  }
}

TEST(ArenaTest, DoesNothingForAnEmptyRange) {
  const Arena arena(3);
  EXPECT_TRUE(Ranges(arena, 0, 1).empty());
  EXPECT_TRUE(Ranges(arena, -5, 1).empty());
}

TEST(ArenaTest, TakesAGrainOfZeroAsOne) {
  EXPECT_EQ(Ranges(Arena(2), 1, 0).size(), 1u);
  EXPECT_GE(Ranges(Arena(2), 10, 0).size(), 2u);
}

TEST(ArenaTest, HasAtLeastOneThread) {
  EXPECT_EQ(Arena(0).threads(), 1);
  EXPECT_EQ(Arena(-3).threads(), 1);
}

TEST(ArenaTest, RunsUpToOneGrainOnTheCallingThread) {
  const Arena arena(3);
  for (int64_t n : {1, 99, 100}) {
    int calls = 0;
    arena.For(n, 100, [&](int64_t begin, int64_t end) {
      ++calls;
      EXPECT_EQ(begin, 0);
      EXPECT_EQ(end, n);
    });
    EXPECT_EQ(calls, 1);
  }
}

TEST(ArenaTest, RunsOnAsManyThreadsAsAsked) {
  // TBB has no more than the CPUs of the machine.
  const int threads = AvailableCpus();
  const Arena arena(threads);
  // Each piece waits until as many run at once as there are threads; a yielding loop with a limit, not to hang.
  std::atomic<int> running{0};
  std::atomic<bool> all_ran{false};
  arena.For(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (++running == threads) all_ran = true;
      for (int spin = 0; spin < 5000 && !all_ran; ++spin) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  EXPECT_TRUE(all_ran);
}

TEST(ArenaTest, MayBeCalledFromInsideItself) {
  for (int threads : {1, 2, 4}) {
    const Arena arena(threads);
    std::vector<std::atomic<int>> hits(64 * 64);
    arena.For(64, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        arena.For(64, 1, [&, i](int64_t inner_begin, int64_t inner_end) {
          for (int64_t j = inner_begin; j < inner_end; ++j) hits[i * 64 + j]++;
        });
      }
    });
    for (const auto& hit : hits) EXPECT_EQ(hit, 1);
  }
}

TEST(ArenaTest, ServesManyCallersAtOnce) {
  const Arena arena(3);
  constexpr int kCallers = 64;
  std::vector<int64_t> sums(kCallers);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 20; ++round) {
        std::atomic<int64_t> sum{0};
        arena.For(1000, 10, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) sum += i;
        });
        sums[caller] += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (int64_t sum : sums) EXPECT_EQ(sum, 20 * 999 * 500);
}

TEST(ArenaTest, ComesAndGoesManyTimes) {
  for (int i = 0; i < 200; ++i) {
    const Arena arena(1 + i % 4);
    std::atomic<int64_t> count{0};
    arena.For(100, 1, [&](int64_t begin, int64_t end) { count += end - begin; });
    EXPECT_EQ(count, 100);
  }
}

TEST(AvailableCpusTest, CountsTheAffinityMask) {
  const int before = AvailableCpus();
  EXPECT_GE(before, 1);
  EXPECT_LE(before, static_cast<int>(std::thread::hardware_concurrency()));
  // On a thread of its own, since a mask that was narrowed would stay.
  std::thread([] {
    cpu_set_t mask;
    ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &mask)) ++cpu;
    CPU_ZERO(&mask);
    CPU_SET(cpu, &mask);
    ASSERT_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
    EXPECT_EQ(AvailableCpus(), 1);
  }).join();
  EXPECT_EQ(AvailableCpus(), before);
}

}  // namespace
}  // namespace layerd
