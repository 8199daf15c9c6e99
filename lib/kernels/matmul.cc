#include "lib/kernels/matmul.h"

#include <algorithm>
#include <vector>

#include "lib/kernels/matmul_openblas.h"
#include "lib/kernels/openblas.h"
#include "lib/kernels/product.h"

namespace layerd {
namespace {

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
  std::vector<float> memory(static_cast<size_t>(rows * w.in));
  const Factor factor = {.view = w, .bias = bias};
  RowBlocks blocks(memory.data(), rows, w.in, ProductGroupRows(rows, factor, nullptr));
  blocks.PutRows(0, rows, DType::kFloat32, reinterpret_cast<const std::byte*>(x));
  Product(arena, blocks, factor, nullptr, [&](const ProductTile& tile) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      std::copy_n(tile.first + r * tile.stride, tile.cols, y + (tile.row + r) * w.out + tile.col);
    }
  });
}

absl::StatusOr<MatMulReport> InitMatMul(bool allow_openblas) {
  if (!allow_openblas) {
    AllowOpenBlas(false);
    MatMulReport report;
    report.reason = "not allowed";
    return report;
  }
  static const absl::StatusOr<MatMulReport> found = TestOpenBlas();
  AllowOpenBlas(found.ok() && found->used);
  return found;
}

}  // namespace layerd
