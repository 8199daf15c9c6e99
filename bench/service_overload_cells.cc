// Ten times as many calls as can be served, with a deadline, beside callers who just keep the server busy: the time to the
// same number of answers.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "bench/cell.h"
#include "bench/feed_forward_layer.h"
#include "bench/overload.h"
#include "bench/service_cells.h"
#include "bench/services.h"
#include "bench/shapes.h"
#include "lib/base/parallel.h"
#include "lib/layers/feed_forward.h"

namespace layerd::bench {
namespace {

constexpr FeedForwardShape kShape = {4096, 11008};
constexpr int64_t kRows = 64, kAnswers = 60;
constexpr int kCallers = 8;
constexpr double kTimes = 10;
constexpr absl::Duration kDeadline = absl::Seconds(1);

// A call of a bfloat16 layer, again and again, with what it must give.
struct LayerOverload {
  LayerOverload(const Services& services, const Arena& arena)
      : layer(LayerOf(arena, kShape, DType::kBFloat16)), input(layer->input.Rows(0, kRows)) {
    services.Upload(*layer);
    expected = FeedForward(arena, PackedOf(arena, *layer), input, std::nullopt, false)->output;
    FeedForwardCall call;
    call.layer = Services::kLayer;
    call.input = input;
    calls = std::make_unique<Overload>(services.daemon(), std::move(call), expected);
    calls->Closed(1, 1);  // reads the layer
  }

  // Callers who keep the server busy; how many answers they got a second.
  double KeepBusy() { return calls->Closed(kCallers, kAnswers); }

  const std::shared_ptr<LayerUnderTest> layer;
  const Tensor input;
  Tensor expected;
  std::unique_ptr<Overload> calls;
};

void Print(const OverloadCounts& counts) {
  std::printf("overload: %ld answered (p99 %.0f ms), %ld late, %ld refused (p99 %.1f ms), memory grew by %.0f MiB\n",
              counts.answered, counts.answered_p99_seconds * 1e3, counts.late, counts.refused,
              counts.refused_p99_seconds * 1e3, counts.peak_growth_mib);
  if (counts.differing > 0) std::printf("overload: %ld answers have wrong bits\n", counts.differing);
}

// Whether no call that was accepted came late or was answered wrongly, and 99 in 100 refusals came within 10 ms.
bool IsRight(const OverloadCounts& counts) {
  return counts.late == 0 && counts.differing == 0 && counts.refused > 0 && counts.refused_p99_seconds <= 0.010;
}

}  // namespace

void AddServiceOverloadCell(const Services& services, int threads, std::vector<Cell>& cells) {
  Cell cell{.name = {"feed_forward", "overload", "bfloat16", kShape.dim, kShape.hidden_dim, kRows, threads},
            .bound = Bound::kBaseline,
            .baseline = "8 callers",
            .goal = 1 / 0.9,
            .pinned = false};
  cell.prepare = [&services](const Arena& arena) {
    const auto overload = std::make_shared<LayerOverload>(services, arena);
    const auto rate = std::make_shared<double>(overload->KeepBusy());  // of answers, as measured last
    Work work;
    work.baseline = [overload, rate] { *rate = overload->KeepBusy(); };
    work.run = [overload, rate] { overload->calls->Open(kTimes * *rate, kDeadline, kAnswers); };
    work.error = [&arena, overload] {
      const OverloadCounts counts = overload->calls->counts();
      Print(counts);
      return IsRight(counts) ? FeedForwardError(arena, *overload->layer, overload->expected) : BitError(false);
    };
    work.flops = FeedForwardFlops(overload->layer->spec, {kRows, kShape.dim, kShape.hidden_dim, kShape.dim}) * kAnswers;
    work.bytes = WeightBytes(*overload->layer);
    return work;
  };
  cells.push_back(std::move(cell));
}

int RunOverload(const Services& services, int threads, absl::Duration time) {
  const Arena arena(threads);
  LayerOverload overload(services, arena);
  const double before = overload.KeepBusy();
  overload.calls->Open(kTimes * before, kDeadline, std::numeric_limits<int64_t>::max(), time);
  const double after = overload.KeepBusy();
  const OverloadCounts counts = overload.calls->counts();
  Print(counts);
  // The machine's own speed changes within a minute: the best is the mean of before and after.
  const double best = (before + after) / 2, goodput = static_cast<double>(counts.answered) / counts.seconds;
  std::printf(
      "overload: %.0f calls/s for %.1f s; %.2f answers/s, %.2f of what %d callers got (%.2f before, %.2f after)\n",
      kTimes * before, counts.seconds, goodput, goodput / best, kCallers, before, after);
  const bool right = IsRight(counts);
  if (!right) std::puts("overload: WRONG");
  return right ? 0 : 1;
}

}  // namespace layerd::bench
