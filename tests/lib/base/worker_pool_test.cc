#include "lib/base/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "lib/base/errors.h"

namespace layerd {
namespace {

TEST(WorkerPoolTest, RunsEveryJobOnceAndFinishesThemBeforeItEnds) {
  std::atomic<int> ran = 0;
  {
    WorkerPool pool(3, 1000, "--flag");
    EXPECT_EQ(pool.workers(), 3);
    for (int i = 0; i < 500; ++i) ASSERT_TRUE(pool.Submit([&] { ++ran; }).ok());
  }
  EXPECT_EQ(ran, 500);
}

TEST(WorkerPoolTest, AFullQueueRefusesNamesItsFlagAndDestroysTheJob) {
  std::promise<void> started, release;
  WorkerPool pool(1, 1, "--flag");
  ASSERT_TRUE(pool.Submit([&] {
                    started.set_value();
                    release.get_future().wait();
                  })
                  .ok());
  started.get_future().wait();
  ASSERT_TRUE(pool.Submit([] {}).ok());
  auto held = std::make_shared<int>(7);
  const absl::Status status = pool.Submit([held] { FAIL(); });
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_EQ(DetailsOf(status).reason, "OVERLOADED");
  EXPECT_NE(std::string(status.message()).find("--flag"), std::string::npos);
  release.set_value();
}

}  // namespace
}  // namespace layerd
