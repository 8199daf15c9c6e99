// Threads that take jobs from one bounded queue, in order of arrival.
#ifndef LAYERD_LIB_BASE_WORKER_POOL_H_
#define LAYERD_LIB_BASE_WORKER_POOL_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace layerd {

// Threads: Submit() from any; jobs run on the pool's own. The destructor finishes what was accepted.
class WorkerPool {
 public:
  using Job = absl::AnyInvocable<void()>;

  // Starts `threads` workers, at least 1; at most `queue_limit` jobs wait, and `limit_flag` is what sets that limit.
  WorkerPool(int threads, int queue_limit, std::string_view limit_flag);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Queues `job`, which must not throw. A full queue is RESOURCE_EXHAUSTED with a delay measured from how fast the queue
  // drains; a pool without a thread is INTERNAL. The job is destroyed, not run, when it is refused.
  absl::Status Submit(Job job);

  // Workers that could be started: fewer than asked for where the system refused some.
  int workers() const { return static_cast<int>(workers_.size()); }

 private:
  void Work();

  const int queue_limit_;
  const std::string_view limit_flag_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;          // guarded by mutex_
  double mean_job_seconds_ = 0.0;  // guarded by mutex_; exponentially weighted
  bool stopping_ = false;          // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_WORKER_POOL_H_
