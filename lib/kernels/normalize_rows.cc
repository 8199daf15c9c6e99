#include "lib/kernels/normalize_rows.h"

#include <algorithm>

#include "lib/kernels/highway_targets.h"
#include "lib/kernels/normalize_rows_internal.h"
#include "lib/kernels/scratch.h"
#include "lib/kernels/simd.h"

// The order of these matters:
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lib/kernels/normalize_rows.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lib/kernels/normalize_rows_blocks-inl.h"
#include "lib/kernels/normalize_rows_choice-inl.h"
#include "lib/kernels/normalize_rows_tiles-inl.h"
#include "lib/kernels/normalize_rows_weights-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

#if LAYERD_BASELINE_TARGET

void GroupsVectors(const NormalizeRowsArgs& args, int64_t begin, int64_t end) {
  NormalizeGroupsScalar(args, begin, end);
}
void SumBlocksVectors(const NormalizeRowsArgs& args, int64_t group, const Terms& terms, int64_t begin, int64_t end,
                      TermSums* sums) {
  SumBlocksScalar(args, group, terms, begin, end, sums);
}
void ApplyBlocksVectors(const NormalizeRowsArgs& args, int64_t group, const GroupStatistics& statistics, int64_t begin,
                        int64_t end) {
  ApplyBlocksScalar(args, group, statistics, begin, end);
}

#else

// Not the thread's own, which callers of ours may be using.
float* Memory(int64_t floats) {
  static thread_local Scratch scratch;
  return scratch.Get(static_cast<size_t>(floats));
}

// Groups up to this length are gone through in tiles, of rows up to the other, whose γ and β are made ready as a whole.
constexpr int64_t kLongestInTiles = 65536;
constexpr int64_t kLongestRow = int64_t{1} << 20;
// Groups up to this length may go side by side.
constexpr int64_t kLongestSideBySide = 8192;

struct RunTiles {
  const NormalizeRowsArgs& args;
  float* memory;
  int64_t begin, end;  // groups

  template <class Form>
  void Run(const Weights& weights) const {
    int64_t first = begin;
    if constexpr (Form::kStreamedSideBySide > 1) {
      const int tile = args.stream_output ? Form::kStreamedSideBySide : Form::kSideBySide;
      if (tile > 1 && args.group_size == args.dim && args.dim % kStep == 0 && args.dim <= kLongestSideBySide) {
        first = end - (end - begin) % kMostSideBySide;
        Tiles<Form, kMostSideBySide>(args, weights, memory).Run(begin, first);
      }
    }
    Tiles<Form, 1>(args, weights, memory).Run(first, end);
  }
};

// Normalises groups by a form; false where there is none for them.
bool RunByForm(const NormalizeRowsArgs& args, int64_t begin, int64_t end) {
  if (args.group_size > kLongestInTiles || args.dim > kLongestRow) return false;
  const int64_t tile = args.group_size <= kLongestSideBySide ? kMostSideBySide : 1;
  const int64_t made = FloatSource(args).in_place() ? 0 : kStages * tile * args.group_size;
  float* const memory = Memory(Weights::Floats(args.dim) + made);
  Weights weights(args, 0, args.dim, memory);
  return RunWithForm(args, weights, RunTiles{args, memory + Weights::Floats(args.dim), begin, end});
}

void GroupsVectors(const NormalizeRowsArgs& args, int64_t begin, int64_t end) {
  if (begin >= end) return;
  // What the wide forms want made ready for a row costs more than it saves with a single one.
  const bool exactly = (end - begin) * args.group_size <= args.dim && args.output_dtype == DType::kFloat32;
  if (!exactly && RunByForm(args, begin, end)) return;
  Blocks blocks(args, Memory(Blocks::Floats()), exactly);
  const int64_t count = BlocksOf(args);
  for (int64_t group = begin; group < end; ++group) {
    const GroupStatistics statistics = StatisticsBy(args, [&](const Terms& terms) {
      TermSums total;
      for (int64_t block = 0; block < count; ++block) total.Add(blocks.Sum(group, block, terms));
      return total;
    });
    WriteStatistics(args, group, statistics);
    for (int64_t block = 0; block < count; ++block) blocks.Write(group, block, statistics);
  }
}

void SumBlocksVectors(const NormalizeRowsArgs& args, int64_t group, const Terms& terms, int64_t begin, int64_t end,
                      TermSums* sums) {
  Blocks blocks(args, Memory(Blocks::Floats()));
  for (int64_t block = begin; block < end; ++block) sums[block - begin] = blocks.Sum(group, block, terms);
}

void ApplyBlocksVectors(const NormalizeRowsArgs& args, int64_t group, const GroupStatistics& statistics, int64_t begin,
                        int64_t end) {
  Blocks blocks(args, Memory(Blocks::Floats()));
  for (int64_t block = begin; block < end; ++block) blocks.Write(group, block, statistics);
}

#endif  // LAYERD_BASELINE_TARGET

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd {

HWY_EXPORT(GroupsVectors);
HWY_EXPORT(SumBlocksVectors);
HWY_EXPORT(ApplyBlocksVectors);

void NormalizeGroups(const NormalizeRowsArgs& args, int64_t begin, int64_t end) {
  if (ActiveSimd() == Simd::kScalar) return NormalizeGroupsScalar(args, begin, end);
  HWY_DYNAMIC_DISPATCH(GroupsVectors)(args, begin, end);
}

void SumBlocks(const NormalizeRowsArgs& args, int64_t group, const Terms& terms, int64_t begin, int64_t end,
               TermSums* sums) {
  if (ActiveSimd() == Simd::kScalar) return SumBlocksScalar(args, group, terms, begin, end, sums);
  HWY_DYNAMIC_DISPATCH(SumBlocksVectors)(args, group, terms, begin, end, sums);
}

void ApplyBlocks(const NormalizeRowsArgs& args, int64_t group, const GroupStatistics& statistics, int64_t begin,
                 int64_t end) {
  if (ActiveSimd() == Simd::kScalar) return ApplyBlocksScalar(args, group, statistics, begin, end);
  HWY_DYNAMIC_DISPATCH(ApplyBlocksVectors)(args, group, statistics, begin, end);
}

}  // namespace layerd
#endif  // HWY_ONCE
