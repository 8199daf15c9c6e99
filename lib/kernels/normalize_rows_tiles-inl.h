// The order in which groups that fit into the caches are gone through: one read and one write of memory.
// Included once per SIMD target, by normalize_rows.cc only.

#include <algorithm>
#include <utility>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "lib/kernels/normalize_rows_exact-inl.h"
#include "lib/kernels/normalize_rows_fast-inl.h"
#include "lib/kernels/normalize_rows_internal.h"
#include "lib/kernels/normalize_rows_source-inl.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_TILES_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_TILES_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_TILES_INL_H_
#endif

#if !LAYERD_BASELINE_TARGET
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

inline constexpr int kStages = 2;

// A tile is kTile consecutive groups, gone through side by side: whole rows of whole steps, if more than one. While the sums of one are taken, the output of the one
// before is written, in one loop, so that memory and arithmetic are busy all the time.
template <class Form, int kTile>
class Tiles {
 public:
  // `memory` has room for the float32 of kStages · kTile groups, where those have to be made.
  Tiles(const NormalizeRowsArgs& args, const Weights& weights, float* memory)
      : args_(args), weights_(weights), source_(args), memory_(memory), n_(args.group_size) {}

  // Normalises groups begin .. end − 1, a multiple of kTile.
  void Run(int64_t begin, int64_t end) const {
    if (begin >= end) return;
    Form::ClearDoubts();
    NormalizeGroup group = GroupAt(args_, begin);
    Tile ring[kStages];
    for (int i = 0; i < kStages; ++i) ring[i].made = memory_ + i * kTile * n_;
    Stages stages = {};
    int free = 0;
    do {
      stages.summed = group.index < end ? &ring[free] : nullptr;
      if (stages.summed != nullptr) Aim(*stages.summed, group);
      free = (free + 1) % kStages;
      Pass(stages);
      stages.written = stages.summed;
      if (stages.written != nullptr) Finish(*stages.written);
    } while (stages.written != nullptr);
    if (args_.stream_output) hwy::FlushStream();
  }

 private:
  using Sums = Accumulators<Form::kFirstTerm>;
  using Doubt = typename Form::Doubt;

  // How many elements ahead of the first sums is fetched.
  static constexpr int64_t kAhead = 1024;
  // Elements that are made at once, to be summed while they are in the first-level cache.
  static constexpr int64_t kChunk = 1024;
  static_assert(kSumBlock % kChunk == 0 && kChunk % kStep == 0);

  struct Tile {
    float* made;  // x of the first group, where it has to be made; of the others n further on
    GroupInput groups[kTile];
    TermSums totals[kTile];
    bool takes;  // the form is right for all of its groups
    Form forms[kTile];
    Doubt doubt;
    int64_t shift;      // from where on the output of each group is aligned, when it is streamed
    int64_t write_end;  // whole steps, beginning at the shift
  };

  // The tile that is in each stage, or null.
  struct Stages {
    Tile* summed;
    Tile* written;
  };

  // `tile` becomes the groups from `group` on, which moves past it.
  void Aim(Tile& tile, NormalizeGroup& group) const {
    for (int k = 0; k < kTile; ++k) {
      tile.groups[k] = {source_.At(group.first, tile.made + k * n_), group, {}};
      tile.totals[k] = {};
      group.first += n_;
      group.index += 1;
      group.offset += n_;
      if (group.offset == args_.dim) group.offset = 0;
    }
  }

  // Takes each tile through its stage.
  HWY_NOINLINE void Pass(const Stages& stages) const {
    const bool writes = stages.written != nullptr && stages.written->takes;
    const bool together = writes && stages.summed != nullptr;
    if (writes) BeginWriting(*stages.written);
    if (writes && !together) WriteSteps(*stages.written);
    for (int64_t block = 0; block < n_ && stages.summed != nullptr; block += kSumBlock) {
      const int64_t block_end = std::min(n_, block + kSumBlock);
      Sums sums[kTile];
      for (int k = 0; k < kTile; ++k) sums[k].Clear();
      for (int64_t i = block, end = 0; i < block_end; i = end) {
        end = source_.makes() ? std::min(block_end, i + kChunk) : block_end;
        const int64_t steps_end = end / kStep * kStep;
        for (int k = 0; k < kTile; ++k) {
          source_.Make(stages.summed->groups[k].group.first + i, end - i, stages.summed->made + k * n_ + i);
        }
        int64_t done = i;
        if (together) {
          done = std::clamp(stages.written->write_end, i, steps_end);
          StepsTogether(stages, sums, i, done);
        }
        SumSteps(*stages.summed, sums, done, steps_end);
      }
      AddTotals(*stages.summed, sums, block_end);
    }
    if (stages.written != nullptr) EndWriting(*stages.written);
  }

  void BeginWriting(Tile& tile) const {
    tile.shift = args_.stream_output ? std::min(n_, ElementsToAlignment(tile.forms[0].out())) : 0;
    tile.write_end = (n_ - tile.shift) / kStep * kStep;
    tile.doubt.Clear();
  }
  // Writes what the steps leave, or all of it where they may have been wrong.
  void EndWriting(const Tile& tile) const {
    if (!tile.takes || !Form::IsSure(tile.doubt)) {
      for (int k = 0; k < kTile; ++k) tile.forms[k].WriteExactly(0, n_);
      Form::ClearDoubts();
      return;
    }
    const int64_t written_end = tile.shift + tile.write_end;
    for (int k = 0; k < kTile; ++k) {
      if (tile.shift > 0) tile.forms[k].WriteExactly(0, tile.shift);
      if (written_end < n_) tile.forms[k].WriteExactly(written_end, n_ - written_end);
    }
  }

  // Sums up what is less than a step.
  void AddTotals(Tile& tile, const Sums* sums, int64_t block_end) const {
    const int64_t rest = block_end % kStep;
    for (int k = 0; k < kTile; ++k) {
      tile.totals[k].Add(sums[k].Total(tile.groups[k].x + block_end - rest, rest, 0.0));
    }
  }

  // The inner loops, for elements begin .. end − 1 of what is summed, and as many of what is written from its shift on.
  // They work on copies of what they use again and again, which the compiler keeps in registers. In each step all loads
  // come before the first store: where rows are a multiple of 4 KiB, a load from the next row would wait for a store to
  // this one, whose address ends alike.
  struct Summer {
    HWY_INLINE Summer(const Tile& tile, const Sums* from) {
      for (int k = 0; k < kTile; ++k) {
        sums[k] = from[k];
        x[k] = tile.groups[k].x;
      }
    }
    HWY_INLINE void Step(int64_t i) {
      for (int k = 0; k < kTile; ++k) sums[k].Add(x[k] + i, hn::Zero(D()));
    }
    HWY_INLINE void Done(Sums* to) const {
      for (int k = 0; k < kTile; ++k) to[k] = sums[k];
    }
    Sums sums[kTile];
    const float* x[kTile];
  };
  struct Writer {
    HWY_INLINE Writer(const Tile& tile, bool to_stream) : shift(tile.shift), stream(to_stream) {
      doubt = tile.doubt;
      for (int k = 0; k < kTile; ++k) {
        forms[k] = tile.forms[k];
        x[k] = tile.groups[k].x;
      }
    }
    HWY_INLINE void Step(int64_t i) {
      constexpr int kPieces = kStep / kWideLanes;
      using Piece = decltype(forms[0].Compute(x[0], forms[0].ColumnsAt(i), doubt));
      Piece pieces[kTile][kPieces];
      for (int j = 0; j < kPieces; ++j) {
        const int64_t column = i + shift + j * kWideLanes;
        const auto columns = forms[0].ColumnsAt(column);
        for (int k = 0; k < kTile; ++k) pieces[k][j] = forms[k].Compute(x[k] + column, columns, doubt);
      }
      for (int k = 0; k < kTile; ++k) {
        for (int j = 0; j < kPieces; ++j) forms[k].Put(pieces[k][j], i + shift + j * kWideLanes, stream);
      }
    }
    Form forms[kTile];
    Doubt doubt;
    int64_t shift;
    const float* x[kTile];
    bool stream;
  };
  // Fetches input, kAhead further on than it is summed. What comes after the end of the last group of a tile is the
  // next tile's; the other groups' ends are left to the processor.
  struct Fetcher {
    HWY_INLINE Fetcher(const FloatSource& source, const Tile& tile) : element_bytes(source.element_bytes()) {
      for (int k = 0; k < kTile; ++k) input[k] = source.input_at(tile.groups[k].group.first + kAhead);
    }
    HWY_INLINE void Step(int64_t i) const {
      for (int k = 0; k < kTile; ++k) __builtin_prefetch(input[k] + i * element_bytes);
    }
    int64_t element_bytes;
    const std::byte* input[kTile];
  };

  HWY_NOINLINE void StepsTogether(const Stages& stages, Sums* sums, int64_t begin, int64_t end) const {
    const Fetcher fetcher(source_, *stages.summed);
    Summer summer(*stages.summed, sums);
    Writer writer(*stages.written, args_.stream_output);
    for (int64_t i = begin; i < end; i += kStep) {
      fetcher.Step(i);
      summer.Step(i);
      writer.Step(i);
    }
    summer.Done(sums);
    stages.written->doubt = writer.doubt;
  }

  HWY_NOINLINE void SumSteps(const Tile& tile, Sums* sums, int64_t begin, int64_t end) const {
    const Fetcher fetcher(source_, tile);
    Summer summer(tile, sums);
    for (int64_t i = begin; i < end; i += kStep) {
      fetcher.Step(i);
      summer.Step(i);
    }
    summer.Done(sums);
  }

  HWY_NOINLINE void WriteSteps(Tile& tile) const {
    Writer writer(tile, args_.stream_output);
    for (int64_t i = 0; i < tile.write_end; i += kStep) writer.Step(i);
    tile.doubt = writer.doubt;
  }

  TermSums SumCentred(const float* x, double center) const {
    TermSums total;
    for (int64_t block = 0; block < n_; block += kSumBlock) {
      total.Add(SumBlock<SumTerm::kCentred>(x + block, std::min(kSumBlock, n_ - block), center));
    }
    return total;
  }

  void Finish(Tile& tile) const {
    tile.takes = true;
    for (int k = 0; k < kTile; ++k) {
      GroupInput& in = tile.groups[k];
      in.statistics =
          StatisticsOf(args_, tile.totals[k], [&](const Terms& terms) { return SumCentred(in.x, terms.center); });
      WriteStatistics(args_, in.group.index, in.statistics);
      tile.forms[k].Begin(args_, weights_, in);
      tile.takes = tile.takes && Form::Takes(in.statistics);
    }
  }

  const NormalizeRowsArgs& args_;
  const Weights& weights_;
  FloatSource source_;
  float* memory_;
  int64_t n_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // !LAYERD_BASELINE_TARGET

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_TILES_INL_H_
