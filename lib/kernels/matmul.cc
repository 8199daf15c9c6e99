#include "lib/kernels/matmul.h"

#include <algorithm>
#include <atomic>

#include "lib/kernels/matmul_openblas.h"
#include "lib/kernels/matmul_own.h"
#include "lib/kernels/openblas.h"
#include "lib/kernels/simd.h"

namespace layerd {
namespace {

// Set by InitMatMul() once the self-test has passed.
std::atomic<bool> openblas_allowed{false};

// Up to so many rows our own kernel serves even where OpenBLAS may: measured on a Xeon (family 6, model 207), 2
// threads, 512 → 1365 and 2048 → 5632, it is 1.1 to 2 times as fast up to 64 rows, and 0.8 to 1.3 times above. An
// exception is float32 [in, out] with up to 4 rows (0.5 to 1.1 times), where a copy into panels costs more than the
// product.
constexpr int64_t kOwnRows = 64;
constexpr int64_t kFewestOwnRows = 5;

// The largest tile of our own kernel: 252 is a multiple of the rows of its micro-kernels, and 252 · 256 floats of x
// stay in the second-level cache. With few rows x is small anyway, and tiles of one panel read the weights in long
// runs.
constexpr int64_t kOwnTileRows = 252;
constexpr int64_t kOwnTileCols = 512;
constexpr int64_t kFewRows = 16;

// Columns of a tile are a multiple of this, and this of the panels of our own kernels.
constexpr int64_t kPanel = 64;
// Rows below which a tile is not divided for the sake of the threads.
constexpr int64_t kLeastRows = 32;
// Multiply-adds below which it does not pay to wake a thread: some 10 µs.
constexpr int64_t kGrain = 1 << 18;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool UseOpenBlas(int64_t rows, const WeightView& w) {
  static const Simd widest = SupportedSimd().back();
  if (!openblas_allowed.load(std::memory_order_acquire) || ActiveSimd() != widest) return false;
  if (rows > kOwnRows) return true;
  return w.layout == WeightLayout::kInOut && w.dtype == DType::kFloat32 && rows < kFewestOwnRows;
}

// Loads and tests; its answer does not change while the process lives.
absl::StatusOr<MatMulReport> TestOpenBlas() {
  const openblas::Library& library = openblas::Load();
  MatMulReport report;
  report.openblas_version = library.version;
  report.openblas_core = library.core;
  report.openblas_requested = library.requested;
  if (!library.loaded) {
    report.reason = library.error;
    return report;
  }
  if (absl::Status status = CheckOpenBlasProducts(); !status.ok()) return status;
  report.reason = FindOpenBlasDifference();
  report.follows_order = report.reason.empty();
  report.used = report.follows_order;
  return report;
}

}  // namespace

void MatMul(const Arena& arena, const float* x, int64_t rows, const WeightView& w, const float* bias, float* y) {
  if (rows <= 0 || w.out <= 0) return;
  if (w.in == 0) {
    for (int64_t i = 0; i < rows * w.out; ++i) y[i] = bias == nullptr ? 0.0f : OneNan(0.0f + bias[i % w.out]);
    return;
  }
  const bool use_openblas = UseOpenBlas(rows, w);
  const int64_t max_rows = use_openblas ? kOpenBlasRows : kOwnTileRows;
  const int64_t max_cols = use_openblas ? kOpenBlasCols : rows <= kFewRows ? kPanel : kOwnTileCols;

  // Rows and columns are divided, never k. Two tiles for each thread, so that one that started late does less; by
  // columns first, since each tile packs its weights for itself, and by rows where there are too few columns.
  const int64_t wanted = arena.threads() > 1 ? 2 * arena.threads() : 1;
  const int64_t panels = CeilDiv(w.out, kPanel);
  int64_t row_tiles = CeilDiv(rows, max_rows);
  if (row_tiles * panels < wanted) {
    row_tiles = std::max(row_tiles, std::min(CeilDiv(wanted, panels), CeilDiv(rows, kLeastRows)));
  }
  const int64_t cols = std::min(max_cols, kPanel * CeilDiv(panels, CeilDiv(wanted, row_tiles)));
  const int64_t col_tiles = CeilDiv(w.out, cols);

  const int64_t tile_work = CeilDiv(rows, row_tiles) * cols * w.in;
  arena.For(row_tiles * col_tiles, CeilDiv(kGrain, tile_work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // Tiles of the same rows are neighbours: a thread that does several of them finds x in its cache.
      const int64_t row = rows * (i / col_tiles) / row_tiles;
      const int64_t row_end = rows * (i / col_tiles + 1) / row_tiles;
      const int64_t col = i % col_tiles * cols;
      const MatMulTile tile{x + row * w.in, row_end - row, w, bias, y + row * w.out, col, std::min(col + cols, w.out)};
      use_openblas ? MatMulOpenBlas(tile) : MatMulOwn(tile);
    }
  });
}

absl::StatusOr<MatMulReport> InitMatMul(bool allow_openblas) {
  if (!allow_openblas) {
    openblas_allowed.store(false, std::memory_order_release);
    MatMulReport report;
    report.reason = "not allowed";
    return report;
  }
  static const absl::StatusOr<MatMulReport> found = TestOpenBlas();
  openblas_allowed.store(found.ok() && found->used, std::memory_order_release);
  return found;
}

}  // namespace layerd
