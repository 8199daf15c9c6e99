#include "bench/limits.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "bench/limits_kernels.h"
#include "bench/random_data.h"
#include "bench/threads.h"

namespace layerd::bench {
namespace {

// What a loop computes must be used, or the compiler leaves the loop out.
std::atomic<float> sink{0};

constexpr double kTrialSeconds = 0.003;  // of each way, when the best one is looked for
constexpr int64_t kRounds = 4096;        // of multiply-adds, some tens of microseconds

// Memory of at least `floats`, which all Limits share; what it held before may be lost.
const Tensor& BufferOf(const Arena& arena, Tensor& buffer, int64_t floats) {
  if (buffer.num_elements() < floats) {
    buffer = Tensor();  // before the new one, so that both are never held
    buffer = NormalTensor(arena, 1, DType::kFloat32, {floats});
  }
  return buffer;
}

// Each thread's share of `bytes`, in floats, rounded up.
int64_t ShareOf(double bytes, int threads) {
  const auto share = static_cast<int64_t>(bytes / sizeof(float) / threads) + kLimitFloats - 1;
  return std::max(kLimitFloats, share / kLimitFloats * kLimitFloats);
}

}  // namespace

double Limits::Measure(std::map<int64_t, Plan>& plans, int64_t size, int ways,
                       absl::FunctionRef<void(int part, int way)> body) {
  // As a Sampler does: a turn before those that count, where they are more than one.
  const auto run = [&](int way, int64_t turns) {
    if (turns > 1) OnAllThreads(arena_, [&](int part) { body(part, way); });
    return OnAllThreads(arena_,
                        [&](int part) {
                          for (int64_t turn = 0; turn < turns; ++turn) body(part, way);
                        }) /
           static_cast<double>(turns);
  };
  const auto [found, is_new] = plans.try_emplace(size);
  Plan& plan = found->second;
  if (is_new) {
    for (int way = 0; way < ways; ++way) {
      run(way, 1);  // caches and clocks
      int64_t turns = 1;
      double seconds = run(way, turns);
      for (; seconds * static_cast<double>(turns) < kTrialSeconds; seconds = run(way, turns)) turns *= 2;
      for (int again = 0; again < 2; ++again) seconds = std::min(seconds, run(way, turns));
      if (way == 0 || seconds < plan.seconds) plan = {way, seconds};
    }
  }
  return run(plan.way, std::max<int64_t>(1, std::llround(sample_seconds_ / plan.seconds)));
}

double Limits::Read(double bytes) {
  static Tensor memory;
  const int64_t share = ShareOf(bytes, arena_.threads());
  const float* in = BufferOf(arena_, memory, share * arena_.threads()).floats();
  const double seconds = Measure(read_plans_, share, 2, [&](int part, int way) {
    sink = way == 0 ? ReadForward(in + part * share, share) : ReadFourStreams(in + part * share, share);
  });
  return seconds * bytes / static_cast<double>(share * arena_.threads() * static_cast<int64_t>(sizeof(float)));
}

double Limits::Copy(double bytes) {
  static Tensor from, to;
  const int64_t share = ShareOf(bytes / 2, arena_.threads());
  const int64_t floats = share * arena_.threads();
  const float* in = BufferOf(arena_, from, floats).floats();
  BufferOf(arena_, to, floats);
  float* out = to.mutable_floats();
  const double seconds = Measure(copy_plans_, share, 2, [&](int part, int way) {
    (way == 0 ? bench::Copy : CopyNonTemporal)(in + part * share, out + part * share, share);
  });
  copies_non_temporally_ = copy_plans_[share].way == 1;
  return seconds * bytes / static_cast<double>(2 * floats * static_cast<int64_t>(sizeof(float)));
}

double Limits::Multiply(double flops) {
  const double seconds = Measure(multiply_plans_, 0, 1, [](int part, int way) { sink = MultiplyAdd(kRounds); });
  return seconds * flops / static_cast<double>(FlopsOfRound() * kRounds * arena_.threads());
}

}  // namespace layerd::bench
