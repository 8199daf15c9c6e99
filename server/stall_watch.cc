#include "server/stall_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

constexpr int64_t kRetryDelayMs = 1000;

}  // namespace

StallWatch::StallWatch(absl::Duration limit, std::function<bool()> is_short)
    : limit_(limit), is_short_(std::move(is_short)), watcher_([this] { Watch(); }) {}

StallWatch::~StallWatch() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  watcher_.join();
}

void StallWatch::Begin(Wait& wait) {
  std::lock_guard<std::mutex> lock(mutex_);
  wait.since_ = Clock::now();
  wait.place_ = waiting_.insert(waiting_.end(), &wait);
  wait.watched_ = true;
}

bool StallWatch::End(Wait& wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!wait.watched_) {
    if (std::this_thread::get_id() != watcher_.get_id()) ended_.wait(lock, [&] { return ending_ != &wait; });
    return false;
  }
  waiting_.erase(wait.place_);
  wait.watched_ = false;
  return true;
}

void StallWatch::Watch() {
  const auto often = std::clamp<Clock::duration>(absl::ToChronoNanoseconds(limit_ / 8), std::chrono::milliseconds(5),
                                                 std::chrono::milliseconds(500));
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_.wait_for(lock, often, [this] { return stopping_; })) {
    const auto limit = Clock::now() - absl::ToChronoNanoseconds(limit_);
    // One at a time: what it holds may be enough.
    while (!waiting_.empty() && waiting_.front()->since_ <= limit && is_short_()) {
      Wait& stalled = *waiting_.front();
      waiting_.pop_front();
      stalled.watched_ = false;
      ending_ = &stalled;
      lock.unlock();
      stalled.EndStalled(
          Overloaded(absl::StrCat("busy: others wait for memory, and this call's message has been on its way for "
                                  "more than ",
                                  absl::FormatDuration(limit_), " (--stall_s)"),
                     kRetryDelayMs));
      lock.lock();
      ending_ = nullptr;
      ended_.notify_all();
    }
  }
}

}  // namespace layerd
