// How the work of normalize_rows is divided over threads.
#include <algorithm>
#include <array>

#include "lib/kernels/normalize_rows_internal.h"

namespace layerd {
namespace {

// Of work that is worth another thread: some 20 µs of it, where waking one takes a few.
constexpr int64_t kElementsPerTask = 65536;
constexpr int64_t kBlocksPerTask = kElementsPerTask / kSumBlock;

// The sum of all blocks in order, each computed by whichever thread comes to it.
TermSums SumOf(const Arena& arena, const NormalizeRowsArgs& args, int64_t group, const Terms& terms) {
  std::array<TermSums, 1024> sums;  // of the blocks of one wave; 2²³ elements
  const int64_t blocks = BlocksOf(args);
  TermSums total;
  for (int64_t first = 0; first < blocks; first += static_cast<int64_t>(sums.size())) {
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(sums.size()), blocks - first);
    arena.For(count, kBlocksPerTask, [&](int64_t begin, int64_t end) {
      SumBlocks(args, group, terms, first + begin, first + end, &sums[static_cast<size_t>(begin)]);
    });
    for (int64_t i = 0; i < count; ++i) total.Add(sums[static_cast<size_t>(i)]);
  }
  return total;
}

}  // namespace

void NormalizeRows(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t groups_per_row = args.dim / args.group_size;
  NormalizeGroups(args, row_begin * groups_per_row, row_end * groups_per_row);
}

void NormalizeRows(const Arena& arena, const NormalizeRowsArgs& args, int64_t rows) {
  const int64_t groups = rows * (args.dim / args.group_size);
  // Groups as long as this are gone through block by block whoever does it, and few of them divide unevenly.
  const bool few_long = args.group_size >= 2 * kElementsPerTask && groups < 4 * int64_t{arena.threads()};
  if (arena.threads() == 1 || !few_long) {
    const int64_t grain = std::max<int64_t>(1, kElementsPerTask / args.group_size);
    arena.For(groups, grain, [&](int64_t begin, int64_t end) { NormalizeGroups(args, begin, end); });
    return;
  }
  for (int64_t group = 0; group < groups; ++group) {
    const GroupStatistics statistics =
        StatisticsBy(args, [&](const Terms& terms) { return SumOf(arena, args, group, terms); });
    WriteStatistics(args, group, statistics);
    arena.For(BlocksOf(args), kBlocksPerTask,
              [&](int64_t begin, int64_t end) { ApplyBlocks(args, group, statistics, begin, end); });
  }
}

}  // namespace layerd
