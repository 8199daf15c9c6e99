#include "bench/threads.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
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

// What OnAllThreads() does; nothing where a thread of the arena does not come at once: TBB may miss to wake one.
std::optional<double> TryOnAllThreads(const Arena& arena, absl::FunctionRef<void(int part)> body) {
  enum State { kGathering, kRunning, kGivenUp };
  const int threads = arena.threads();
  std::atomic<int> arrived{0};
  std::atomic<State> state{kGathering};
  Clock::time_point begin;
  // Each piece waits for the others, so no thread can take two of them.
  arena.For(threads, 1, [&](int64_t first, int64_t end) {
    if (end - first != 1) {
      std::fprintf(stderr, "the arena gave one thread the work of all\n");
      std::exit(1);
    }
    const auto turn = [&state](State to) {
      State from = kGathering;
      return state.compare_exchange_strong(from, to);
    };
    if (arrived.fetch_add(1) + 1 == threads) {
      begin = Clock::now();
      turn(kRunning);
    }
    const auto limit = Clock::now() + std::chrono::milliseconds(20);
    while (state.load() == kGathering) {
      if (Clock::now() > limit) turn(kGivenUp);
    }
    if (state.load() == kRunning) body(static_cast<int>(first));
  });
  if (state.load() != kRunning) return std::nullopt;
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

double OnAllThreads(const Arena& arena, absl::FunctionRef<void(int part)> body) {
  Cpus();
  const auto limit = Clock::now() + std::chrono::minutes(1);
  while (Clock::now() < limit) {
    if (const auto seconds = TryOnAllThreads(arena, body)) return *seconds;
  }
  std::fprintf(stderr, "the arena's %d threads did not all come to work within a minute\n", arena.threads());
  std::exit(1);
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
