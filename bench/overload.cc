#include "bench/overload.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "bench/fail.h"
#include "client/remote_engine.h"

namespace layerd::bench {
namespace {

double Percentile99(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto place = values.begin() + static_cast<ptrdiff_t>(values.size() * 99 / 100);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

}  // namespace

struct Overload::State {
  State(const Daemon& called, FeedForwardCall sent, Tensor answer)
      : daemon(called), call(std::move(sent)), expected(std::move(answer)), engine({.target = called.targets()[0]}) {}

  void Send(absl::Duration deadline) {
    FeedForwardCall one = call;
    const absl::Time begun = absl::Now();
    one.context.deadline = begun + deadline;
    engine.FeedForward(std::move(one), [this, begun](absl::StatusOr<FeedForwardResult> result) {
      const double seconds = absl::ToDoubleSeconds(absl::Now() - begun);
      const bool same = result.ok() && SameBits(result->outputs.output, expected);
      std::lock_guard<std::mutex> lock(mutex);
      if (result.ok()) {
        ++counts.answered;
        answer_seconds.push_back(seconds);
        if (!same) ++counts.differing;
      } else if (absl::IsResourceExhausted(result.status())) {
        ++counts.refused;
        refusal_seconds.push_back(seconds);
      } else if (absl::IsDeadlineExceeded(result.status())) {
        ++counts.late;
      } else {
        Fail(result.status());
      }
      --under_way;
      changed.notify_all();
    });
  }

  const Daemon& daemon;
  const FeedForwardCall call;
  const Tensor expected;
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex, but for the engine.
  OverloadCounts counts;
  std::vector<double> refusal_seconds, answer_seconds;
  int64_t under_way = 0;
  RemoteEngine engine;  // first to go: its calls use the rest
};

Overload::Overload(const Daemon& daemon, FeedForwardCall call, Tensor expected)
    : state_(std::make_unique<State>(daemon, std::move(call), std::move(expected))) {}
Overload::~Overload() = default;

double Overload::Closed(int callers, int64_t answers) {
  const absl::Time begun = absl::Now();
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller) {
    threads.emplace_back([this, callers, answers, caller] {
      for (int64_t i = caller; i < answers; i += callers) {
        const auto result = FeedForward(state_->engine, state_->call);
        if (!result.ok()) Fail(result.status());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return static_cast<double>(answers) / absl::ToDoubleSeconds(absl::Now() - begun);
}

void Overload::Open(double rate, absl::Duration deadline, int64_t answers, absl::Duration time) {
  std::mt19937_64 random(1);
  std::exponential_distribution<double> until_next(rate);
  State& state = *state_;
  const double before = state.daemon.MemoryMiB("VmRSS");
  state.daemon.ResetPeak();
  const absl::Time begun = absl::Now();
  absl::Time next = begun;
  std::unique_lock<std::mutex> lock(state.mutex);
  const int64_t wanted = state.counts.answered + answers;
  while (state.counts.answered < wanted && next - begun < time) {
    ++state.under_way;
    lock.unlock();
    state.Send(deadline);
    next += absl::Seconds(until_next(random));
    absl::SleepFor(next - absl::Now());
    lock.lock();
  }
  state.changed.wait(lock, [&] { return state.under_way == 0; });
  state.counts.seconds += absl::ToDoubleSeconds(absl::Now() - begun);
  state.counts.peak_growth_mib = std::max(state.counts.peak_growth_mib, state.daemon.MemoryMiB("VmHWM") - before);
}

OverloadCounts Overload::counts() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  OverloadCounts counts = state_->counts;
  counts.refused_p99_seconds = Percentile99(state_->refusal_seconds);
  counts.answered_p99_seconds = Percentile99(state_->answer_seconds);
  return counts;
}

}  // namespace layerd::bench
