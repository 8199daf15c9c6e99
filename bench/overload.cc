#include "bench/overload.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/remote_engine.h"

namespace layerd::bench {
namespace {

double Percentile99(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto place = values.begin() + static_cast<ptrdiff_t>(values.size() * 99 / 100);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

double ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  double all = 0, resident = 0;
  file >> all >> resident;
  return resident * 4096;
}

[[noreturn]] void Fail(const absl::Status& status) {
  std::fprintf(stderr, "a call of the overload failed: %s\n", status.ToString().c_str());
  std::exit(1);
}

}  // namespace

struct Overload::State {
  State(const std::string& target, FeedForwardCall sent) : call(std::move(sent)), engine({.target = target}) {}

  void Send(absl::Duration deadline) {
    FeedForwardCall one = call;
    const absl::Time begun = absl::Now();
    one.context.deadline = begun + deadline;
    engine.FeedForward(std::move(one), [this, begun](absl::StatusOr<FeedForwardResult> result) {
      const double seconds = absl::ToDoubleSeconds(absl::Now() - begun);
      std::lock_guard<std::mutex> lock(mutex);
      if (result.ok()) {
        ++counts.answered;
        answer_seconds.push_back(seconds);
        answer = std::move(result->outputs.output);
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

  const FeedForwardCall call;
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex, but for the engine.
  OverloadCounts counts;
  std::vector<double> refusal_seconds, answer_seconds;
  int64_t under_way = 0;
  Tensor answer;
  RemoteEngine engine;  // first to go: its calls use the rest
};

Overload::Overload(const std::string& target, FeedForwardCall call)
    : state_(std::make_unique<State>(target, std::move(call))) {}
Overload::~Overload() = default;

void Overload::Closed(int callers, int64_t answers) {
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
}

void Overload::Open(double rate, absl::Duration deadline, int64_t answers) {
  std::mt19937_64 random(1);
  std::exponential_distribution<double> until_next(rate);
  State& state = *state_;
  const double before = ResidentBytes();
  double peak = before;
  absl::Time next = absl::Now();
  std::unique_lock<std::mutex> lock(state.mutex);
  const int64_t wanted = state.counts.answered + answers;
  while (state.counts.answered < wanted) {
    ++state.under_way;
    lock.unlock();
    state.Send(deadline);
    next += absl::Seconds(until_next(random));
    absl::SleepFor(next - absl::Now());
    lock.lock();
    if (state.counts.refused % 64 == 0) peak = std::max(peak, ResidentBytes());
  }
  state.changed.wait(lock, [&] { return state.under_way == 0; });
  state.counts.peak_resident_growth_bytes = std::max(state.counts.peak_resident_growth_bytes, peak - before);
}

OverloadCounts Overload::counts() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  OverloadCounts counts = state_->counts;
  counts.refused_p99_seconds = Percentile99(state_->refusal_seconds);
  counts.answered_p99_seconds = Percentile99(state_->answer_seconds);
  return counts;
}

const Tensor& Overload::answer() const { return state_->answer; }

}  // namespace layerd::bench
