#include "bench/threads.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace layerd::bench {
namespace {

using Clock = std::chrono::steady_clock;

// The mask of the first call, before anything was bound.
const std::vector<int>& Cpus() {
  static const std::vector<int> cpus = [] {
    std::vector<int> found;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0) {
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &mask)) found.push_back(cpu);
      }
    }
    return found;
  }();
  return cpus;
}

void Bind(pid_t thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int cpu : cpus) CPU_SET(cpu, &mask);
  sched_setaffinity(thread, sizeof(mask), &mask);  // a thread that has just ended is no matter
}

}  // namespace

double OnAllThreads(const Arena& arena, absl::FunctionRef<void(int part)> body) {
  Cpus();
  const int threads = arena.threads();
  std::atomic<int> arrived{0};
  Clock::time_point begin;
  // Each piece waits for the others, so no thread can take two of them.
  arena.For(threads, 1, [&](int64_t first, int64_t end) {
    if (end - first != 1 && threads > 1) {
      std::fprintf(stderr, "the arena gave one thread the work of all\n");
      std::exit(1);
    }
    const auto limit = Clock::now() + std::chrono::minutes(1);
    if (arrived.fetch_add(1) + 1 == threads) {
      begin = Clock::now();
      arrived.fetch_add(1);  // now all go
    }
    while (arrived.load() <= threads) {
      if (Clock::now() < limit) continue;
      std::fprintf(stderr, "only %d of %d threads came to work\n", arrived.load(), threads);
      std::exit(1);
    }
    body(static_cast<int>(first));
  });
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void PinThreads() {
  const std::vector<int>& cpus = Cpus();
  if (cpus.empty()) return;
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return;
  const pid_t caller = gettid();
  size_t others = 0;
  while (const dirent* entry = readdir(tasks)) {
    const pid_t thread = std::atoi(entry->d_name);
    if (thread <= 0) continue;  // "." and ".."
    size_t index = 0;
    if (thread != caller && cpus.size() > 1) index = 1 + others++ % (cpus.size() - 1);
    Bind(thread, {cpus[index]});
  }
  closedir(tasks);
}

void UnpinThread() { Bind(0, Cpus()); }

}  // namespace layerd::bench
