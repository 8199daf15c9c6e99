#include "lib/kernels/product.h"

#include <algorithm>
#include <atomic>

#include "lib/kernels/matmul_openblas.h"
#include "lib/kernels/scratch.h"
#include "lib/kernels/simd.h"
#include "lib/kernels/strip_filling.h"
#include "lib/kernels/strips.h"

namespace layerd {
namespace {

// Groups of rows that share what is read of the weights: 196 rows, of which a block is 196 KiB, stay in the second-level
// cache beside the strips and their sums.
constexpr int64_t kChunkGroups = 14;
// Matrices up to this size may stay in a cache from one call to the next.
constexpr int64_t kCachedBytes = int64_t{4} << 20;
// Groups below which rows are not divided for the sake of the threads.
constexpr int64_t kLeastGroups = 2;
// Multiply-adds of the smallest piece: 4 to 16 µs, where a thread is woken in 4.
constexpr int64_t kGrain = 1 << 16;

// Set by InitMatMul() once the self-test has passed.
std::atomic<bool> openblas_allowed{false};

// Up to so many rows our own kernel serves even where OpenBLAS may; docs/performance.md has the measurements.
constexpr int64_t kOwnRows = 255;
// An exception is float32 [in, out] with fewer rows than these, where a copy into strips costs more than the product.
constexpr int64_t kFewestOwnRows = 5;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The dtype of a factor's strips: what is not packed is widened on the way.
DType StripDType(const Factor& factor) { return factor.panels == nullptr ? DType::kFloat32 : factor.dtype(); }

bool UseOpenBlas(int64_t rows, const Factor& factor) {
  static const Simd widest = SupportedSimd().back();
  if (!openblas_allowed.load(std::memory_order_acquire) || ActiveSimd() != widest) return false;
  const WeightView& w = factor.view;
  if (factor.panels != nullptr || w.dtype != DType::kFloat32 || w.step != 1 || w.in == 0) return false;
  return rows > kOwnRows || (w.layout == WeightLayout::kInOut && rows < kFewestOwnRows);
}

// The panels that are summed side by side: those of the same outputs of two matrices, or neighbours of one.
class Pairs {
 public:
  Pairs(const Factor& first, const Factor* second) : factors_{&first, second} {
    panels_ = CeilDiv(first.out(), kPanelOutputs);
  }

  int64_t count() const { return factors_[1] != nullptr ? panels_ : CeilDiv(panels_, 2); }
  // Null where the last pair has no second panel.
  const Factor* FactorOf(int which) const { return factors_[1] != nullptr ? factors_[which] : factors_[0]; }
  int64_t PanelOf(int64_t pair, int which) const { return factors_[1] != nullptr ? pair : 2 * pair + which; }
  bool Has(int64_t pair, int which) const { return PanelOf(pair, which) < panels_; }
  bool two_matrices() const { return factors_[1] != nullptr; }

 private:
  const Factor* factors_[2];
  int64_t panels_;
};

// What one thread does: some groups of rows by some pairs of panels.
class Worker {
 public:
  Worker(const RowBlocks& x, const Pairs& pairs, ProductTail tail, int64_t group_begin, int64_t group_end)
      : x_(x), pairs_(pairs), tail_(tail), group_begin_(group_begin), group_end_(group_end) {
    first_row_ = x.groups().First(group_begin);
    rows_ = x.groups().First(group_end) - first_row_;
    tile_floats_ = rows_ * kPanelOutputs;
    widened_ = Scratch::OfThread().Get(static_cast<size_t>(2 * kStripFloats + 2 * tile_floats_));
    for (int i = 0; i < 2; ++i) tiles_[i] = widened_ + 2 * kStripFloats + i * tile_floats_;
  }

  void Run(int64_t pair_begin, int64_t pair_end) {
    for (int64_t pair = pair_begin; pair < pair_end; ++pair) {
      for (int64_t k0 = 0; k0 < x_.width(); k0 += kMatMulBlock) {
        const bool last = k0 + kMatMulBlock >= x_.width();
        const int64_t next_pair = !last ? pair : pair + 1 < pair_end ? pair + 1 : kNone;
        SumPair(pair, k0, next_pair, last ? 0 : k0 + kMatMulBlock);
      }
      FinishPair(pair);
    }
  }

 private:
  static constexpr int64_t kNone = -1;

  // The strip of a panel at block k0 where it is packed; null where it is not, or there is none.
  const std::byte* PackedStrip(int64_t pair, int which, int64_t k0) const {
    const Panels* panels = pairs_.FactorOf(which)->panels;
    if (panels == nullptr || !pairs_.Has(pair, which)) return nullptr;
    return panels->panel(pairs_.PanelOf(pair, which)) + panels->OffsetOf(k0);
  }

  // Adds the block at k0; what is wanted next is brought near meanwhile.
  void SumPair(int64_t pair, int64_t k0, int64_t next_pair, int64_t next_k0) {
    const Factor* const factors[2] = {pairs_.FactorOf(0), pairs_.FactorOf(1)};
    // Two matrices of two dtypes are summed one after the other.
    const bool together = StripDType(*factors[0]) == StripDType(*factors[1]);
    StripSums sums = {.dtype = StripDType(*factors[0]),
                      .strips = {},
                      .x = &x_,
                      .k0 = k0,
                      .group_begin = group_begin_,
                      .group_end = group_end_,
                      .y = {tiles_[0], tiles_[1]},
                      .next = {},
                      .next_bytes = 0,
                      .widened = widened_};
    for (int which = 0; which < 2 && pairs_.Has(pair, which); ++which) {
      const Factor& factor = *factors[which];
      const int slot = together ? which : 0;
      sums.dtype = StripDType(factor);
      sums.y[slot] = tiles_[which];
      sums.next[slot] = nullptr;
      if (factor.panels == nullptr) {
        float* strip = widened_ + slot * kStripFloats;
        FillStrip(factor.view, k0, x_.Depth(k0), pairs_.PanelOf(pair, which) * kPanelOutputs, strip);
        sums.strips[slot] = reinterpret_cast<const std::byte*>(strip);
      } else {
        sums.strips[slot] = PackedStrip(pair, which, k0);
        // What is read once and stays in a cache is better left to the hardware.
        const bool streams = group_end_ - group_begin_ > 1 || factor.panels->num_bytes() > kCachedBytes;
        if (next_pair != kNone && streams) {
          sums.next[slot] = PackedStrip(next_pair, which, next_k0);
          sums.next_bytes = factor.panels->OffsetOf(x_.Depth(next_k0));
        }
      }
      if (!together) SumStrips(sums);
    }
    if (together) SumStrips(sums);
  }

  void FinishPair(int64_t pair) {
    const bool both = pairs_.two_matrices();
    for (int which = 0; which < 2 && pairs_.Has(pair, which); ++which) {
      const Factor& factor = *pairs_.FactorOf(which);
      const int64_t col = pairs_.PanelOf(pair, which) * kPanelOutputs;
      const int64_t cols = std::min(kPanelOutputs, factor.out() - col);
      if (x_.width() == 0) std::fill_n(tiles_[which], tile_floats_, 0.0f);
      FinishSums(tiles_[which], rows_, cols, kPanelOutputs, factor.bias == nullptr ? nullptr : factor.bias + col);
      if (both && which == 0) continue;
      tail_(
          {first_row_, rows_, col, cols, kPanelOutputs, both ? tiles_[0] : tiles_[which], both ? tiles_[1] : nullptr});
    }
  }

  const RowBlocks& x_;
  const Pairs& pairs_;
  const ProductTail tail_;
  const int64_t group_begin_;
  const int64_t group_end_;
  int64_t first_row_;
  int64_t rows_;
  int64_t tile_floats_;
  float* widened_;
  float* tiles_[2];
};

// The same by OpenBLAS, for weights as they came: one group of rows by some columns.
void RunOpenBlas(const RowBlocks& x, const Factor& first, const Factor* second, ProductTail tail, int64_t group,
                 int64_t col, int64_t cols) {
  const int64_t rows = x.groups().Size(group);
  float* const tiles = Scratch::OfThread().Get(static_cast<size_t>((second != nullptr ? 2 : 1) * rows * cols));
  const auto multiply = [&](const Factor& factor, float* tile) {
    MatMulOpenBlas(x, group, factor.view, factor.bias, col, col + cols, tile, cols);
    return tile;
  };
  multiply(first, tiles);
  tail({x.groups().First(group), rows, col, cols, cols, tiles,
        second != nullptr ? multiply(*second, tiles + rows * cols) : nullptr});
}

}  // namespace

int64_t ProductGroupRows(int64_t rows, const Factor& first, const Factor* second) {
  if (UseOpenBlas(rows, first) && (second == nullptr || UseOpenBlas(rows, *second))) return kOpenBlasRows;
  if (rows > kFewRows) return kGroupRows;
  return StripDType(first) == DType::kFloat32 ? kFewRowsGroup : kFewRows;
}

void Product(const Arena& arena, const RowBlocks& x, const Factor& first, const Factor* second, ProductTail tail) {
  const int64_t groups = x.groups().count, outs = first.out();
  if (groups == 0 || outs <= 0) return;
  const bool openblas = x.group_rows() == kOpenBlasRows;
  const Pairs pairs(first, second);
  const int64_t columns = openblas ? CeilDiv(outs, kOpenBlasCols) : pairs.count();
  // Where there are few columns for the threads, rows are divided further.
  const int64_t wanted = std::min(CeilDiv(2 * arena.threads(), columns), CeilDiv(groups, kLeastGroups));
  const int64_t chunks = openblas ? groups : std::max(CeilDiv(groups, kChunkGroups), wanted);
  const int64_t piece_outs = openblas ? kOpenBlasCols : 2 * kPanelOutputs;
  const int64_t piece_work = CeilDiv(x.rows(), chunks) * piece_outs * std::max<int64_t>(1, x.width());
  // Chunk by chunk: threads that work at the same time read the same rows of x.
  arena.For(chunks * columns, CeilDiv(kGrain, piece_work), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t chunk = begin / columns;
      const int64_t stop = std::min(end, (chunk + 1) * columns);
      const int64_t column_begin = begin - chunk * columns, column_end = stop - chunk * columns;
      if (openblas) {
        for (int64_t column = column_begin; column < column_end; ++column) {
          const int64_t col = column * kOpenBlasCols;
          RunOpenBlas(x, first, second, tail, chunk, col, std::min(outs - col, kOpenBlasCols));
        }
      } else {
        Worker(x, pairs, tail, groups * chunk / chunks, groups * (chunk + 1) / chunks).Run(column_begin, column_end);
      }
      begin = stop;
    }
  });
}

void AllowOpenBlas(bool allowed) { openblas_allowed.store(allowed, std::memory_order_release); }

}  // namespace layerd
