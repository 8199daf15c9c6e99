#include "lib/base/worker_pool.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <system_error>
#include <utility>

#include "lib/base/errors.h"

namespace layerd {

WorkerPool::WorkerPool(int threads, int queue_limit, std::string_view limit_flag)
    : queue_limit_(queue_limit), limit_flag_(limit_flag) {
  for (int i = 0; i < std::max(1, threads); ++i) {
    try {
      workers_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      break;  // a limit on processes: go on with the threads there are; workers() tells
    }
  }
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

absl::Status WorkerPool::Submit(Job job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty()) return InternalError("no worker thread could be started");
    if (static_cast<int>(queue_.size()) >= queue_limit_) {
      const double seconds =
          mean_job_seconds_ * static_cast<double>(queue_.size()) / static_cast<double>(workers_.size());
      return QueueFull(static_cast<int64_t>(queue_.size()), seconds, limit_flag_);
    }
    queue_.push_back(std::move(job));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void WorkerPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    job();
    job = nullptr;  // what the job holds is freed before the next one begins
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    lock.lock();
    mean_job_seconds_ += 0.125 * (seconds - mean_job_seconds_);
  }
}

}  // namespace layerd
