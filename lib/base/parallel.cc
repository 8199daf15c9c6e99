#include "lib/base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#ifdef LAYERD_STD_THREADS
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <vector>
#else
#include <atomic>

#include "tbb/info.h"
#include "tbb/parallel_for.h"
#include "tbb/task_arena.h"
#endif

namespace layerd {
namespace {

// CPUs in the affinity mask of the calling thread, or 0 where it cannot be read.
int AffinityCpus() {
  // The kernel refuses (EINVAL) a mask smaller than its own, whose size it does not tell: grow until it fits.
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
    cpu_set_t* mask = CPU_ALLOC(cpus);
    if (mask == nullptr) return 0;
    const size_t size = CPU_ALLOC_SIZE(cpus);
    const int count = sched_getaffinity(0, size, mask) == 0 ? CPU_COUNT_S(size, mask) : 0;
    CPU_FREE(mask);
    if (count > 0) return count;
  }
  return 0;
}

// CPUs that `quota` of every `period` microseconds amounts to, rounded up; `limit` where there is no quota.
int QuotaCpus(const std::string& quota, const std::string& period, int limit) {
  const double quota_us = std::atof(quota.c_str());  // "max" and "-1" mean no quota
  const double period_us = std::atof(period.c_str());
  if (!(quota_us > 0) || !(period_us > 0)) return limit;
  const double cpus = quota_us / period_us;
  return cpus >= limit ? limit : std::max(1, static_cast<int>(cpus) + (cpus > static_cast<int>(cpus) ? 1 : 0));
}

std::string FirstWord(std::istream& in) {
  std::string word;
  in >> word;
  return word;
}

// The least quota of the cgroup directories from `base` + `path` up to `base`: each level may set its own, and inside a
// container the path may not exist, while the container's own group is at the top.
int CgroupCpus(const std::string& base, std::string path, int limit) {
  for (;;) {
    const std::string directory = base + path;
    if (std::ifstream v2(directory + "/cpu.max"); v2) {
      const std::string quota = FirstWord(v2);
      limit = QuotaCpus(quota, FirstWord(v2), limit);
    }
    if (std::ifstream v1(directory + "/cpu.cfs_quota_us"); v1) {
      std::ifstream period(directory + "/cpu.cfs_period_us");
      limit = QuotaCpus(FirstWord(v1), FirstWord(period), limit);
    }
    if (path.empty()) return limit;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

// Lines of /proc/self/cgroup are "id:controllers:path"; version 2 has one line, "0::path".
int CgroupLimit(int limit) {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      limit = CgroupCpus("/sys/fs/cgroup", path, limit);
      limit = CgroupCpus("/sys/fs/cgroup/unified", path, limit);  // version 2 beside version 1
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      limit = CgroupCpus("/sys/fs/cgroup/" + controllers, path, limit);
      limit = CgroupCpus("/sys/fs/cgroup/cpu", path, limit);
    }
  }
  return limit;
}

// More pieces than threads, so that a thread that lost its CPU for a while does not keep all the others waiting.
constexpr int64_t kPiecesPerThread = 16;

// [0, n) in pieces whose lengths differ by at most one; as n >= grain · pieces, none is shorter than the grain.
struct Pieces {
  Pieces(int64_t length, int64_t grain, int threads)
      : n(length), count(std::clamp<int64_t>(length / std::max<int64_t>(1, grain), 1, threads * kPiecesPerThread)) {}

  void Run(absl::FunctionRef<void(int64_t, int64_t)> body, int64_t piece) const {
    body(Begin(piece), Begin(piece + 1));
  }
  int64_t Begin(int64_t piece) const { return n / count * piece + std::min(piece, n % count); }

  int64_t n;
  int64_t count;
};

}  // namespace

int AvailableCpus() {
  int cpus = AffinityCpus();
  if (cpus == 0) cpus = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, CgroupLimit(std::max(1, cpus)));
}

#ifdef LAYERD_STD_THREADS

// A pool of threads - 1 workers and a queue of the jobs that still have unclaimed pieces. The caller of For() works on
// its own job, so that a nested For() always gets on even when every worker is busy. One mutex guards all of it: pieces
// are few, and correctness under ThreadSanitizer is what this twin is for.
struct Arena::Impl {
  struct Job {
    absl::FunctionRef<void(int64_t, int64_t)> body;
    Pieces pieces;
    int64_t claimed = 0;
    int64_t done = 0;
  };

  explicit Impl(int threads) {
    for (int i = 1; i < threads; ++i) {
      try {
        workers.emplace_back([this] { Work(); });
      } catch (const std::system_error&) {
        break;  // the limit on processes is reached: those that did start, and the callers, do the work
      }
    }
  }

  ~Impl() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    work_arrived.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void For(Job& job) {
    std::unique_lock<std::mutex> lock(mutex);
    jobs.push_back(&job);
    work_arrived.notify_all();
    while (job.claimed < job.pieces.count) RunNext(job, lock);
    piece_done.wait(lock, [&] { return job.done == job.pieces.count; });
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      work_arrived.wait(lock, [&] { return stop || !jobs.empty(); });
      if (stop) return;
      RunNext(*jobs.front(), lock);
    }
  }

  // Claims a piece of `job`, which has one, and runs it without the lock. After the last piece is counted the job may
  // be gone: its caller returns.
  void RunNext(Job& job, std::unique_lock<std::mutex>& lock) {
    const int64_t piece = job.claimed++;
    if (job.claimed == job.pieces.count) jobs.erase(std::find(jobs.begin(), jobs.end(), &job));
    lock.unlock();
    job.pieces.Run(job.body, piece);
    lock.lock();
    if (++job.done == job.pieces.count) piece_done.notify_all();
  }

  std::mutex mutex;
  std::condition_variable work_arrived;
  std::condition_variable piece_done;
  std::deque<Job*> jobs;
  bool stop = false;
  std::vector<std::thread> workers;
};

#else

// TBB may miss to wake a sleeping worker for a task (its queue's fences are "deliberately sloppy"): one task a thread
// could leave all of the work to the caller. Each further one, queued as the work goes on, is another call.
constexpr int64_t kTasksPerThread = 4;

// Which thread does which pieces: each begins with a share of its own, the same one every time, so that it finds in its
// cache what it read there the last time; when that is done it helps the others, from their last piece backwards.
class Shares {
 public:
  Shares(int64_t pieces, int threads) : count_(std::min(threads, kMost)) {
    for (int i = 0; i < count_; ++i) shares_[i].left = Pack(pieces * i / count_, pieces * (i + 1) / count_);
  }

  // Gives the thread of this slot a piece that nobody else has; false where none is left.
  bool Claim(int slot, int64_t& piece) {
    const int own = slot % count_;
    for (int i = 0; i < count_; ++i) {
      if (Take(shares_[(own + i) % count_].left, /*first=*/i == 0, piece)) return true;
    }
    return false;
  }

 private:
  static constexpr int kMost = 64;
  // First and last + 1 of the pieces that are left, in one word.
  struct alignas(64) Share {
    std::atomic<uint64_t> left;
  };
  static uint64_t Pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }

  static bool Take(std::atomic<uint64_t>& left, bool first, int64_t& piece) {
    uint64_t now = left.load(std::memory_order_relaxed);
    for (;;) {
      const auto begin = static_cast<int64_t>(now >> 32), end = static_cast<int64_t>(now & 0xFFFFFFFFu);
      if (begin >= end) return false;
      piece = first ? begin : end - 1;
      const uint64_t then = first ? Pack(begin + 1, end) : Pack(begin, end - 1);
      if (left.compare_exchange_weak(now, then, std::memory_order_relaxed)) return true;
    }
  }

  const int count_;
  Share shares_[kMost];
};

// TBB starts no more workers than the affinity mask has CPUs (and says so on stderr where an arena asks for more). A
// tbb::global_control could raise that, but where a worker cannot be started its constructor throws and leaves a
// dangling registration.
struct Arena::Impl {
  explicit Impl(int threads) : arena(std::min(threads, tbb::info::default_concurrency())) {}
  tbb::task_arena arena;
};

#endif

Arena::Arena(int threads) : threads_(std::max(1, threads)), impl_(std::make_unique<Impl>(threads_)) {}

Arena::~Arena() = default;

void Arena::For(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t begin, int64_t end)> body) const {
  if (n <= 0) return;
  const Pieces pieces(n, grain, threads_);
  if (threads_ == 1 || pieces.count == 1) {
    body(0, n);
    return;
  }
#ifdef LAYERD_STD_THREADS
  Impl::Job job{body, pieces};
  impl_->For(job);
#else
  Shares shares(pieces.count, threads_);
  const int64_t tasks = std::min<int64_t>(pieces.count, threads_ * kTasksPerThread);
  const int64_t most = (pieces.count + tasks - 1) / tasks;
  // noexcept: a body must not throw, and whatever is caught below is then TBB's own.
  const auto run_pieces = [&](int64_t count) noexcept {
    const int slot = tbb::this_task_arena::current_thread_index();
    for (int64_t piece; count > 0 && shares.Claim(slot < 0 ? 0 : slot, piece); --count) pieces.Run(body, piece);
  };
  try {
    impl_->arena.execute([&] {
      // Isolated: a thread that waits here for the last pieces must not meanwhile pick up a stranger's work, which
      // would run on top of this one's stack, find its thread-local scratch in use, and keep this caller waiting.
      tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(
            int64_t{0}, tasks, [&](int64_t) { run_pieces(most); }, tbb::simple_partitioner());
      });
    });
  } catch (...) {
    // TBB throws when it cannot start a worker (the limit on processes is reached), after the tasks that run have ended
    // and the others were cancelled: what nobody claimed is left, and this thread does it.
    run_pieces(pieces.count);
  }
#endif
}

}  // namespace layerd
