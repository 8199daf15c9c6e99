// Cells of RMSNorm and LayerNorm: the kernel, the layer, and LayerNorm beside RMSNorm.
#include <string>
#include <vector>

#include "bench/cell.h"
#include "bench/norm_layer.h"
#include "bench/shapes.h"

namespace layerd::bench {
namespace {

void AddNorm(NormKind kind, DType dtype, int64_t rows, int threads, std::vector<Cell>& cells) {
  const bool rms = kind == NormKind::kRmsNorm;
  CellName name{rms ? "rms_norm" : "layer_norm", "kernel", std::string(Name(dtype)), kNormDim, 0, rows, threads};
  Cell cell{.name = name, .bound = Bound::kCopy};
  // At least 90 % of the rate of a non-temporal copy.
  if (rms && dtype == DType::kFloat32 && rows == 16384) cell.goal = 1 / 0.9;
  cell.prepare = [=](const Arena& arena) {
    const auto norm = NormOf(arena, kind, dtype, rows);
    return NormWork(norm, NormKernelOf(arena, norm));
  };
  cells.push_back(cell);

  cell.name.variant = "layer";
  cell.goal.reset();
  cell.prepare = [=](const Arena& arena) {
    const auto norm = NormOf(arena, kind, dtype, rows);
    return NormWork(norm, NormLayerOf(arena, norm));
  };
  cells.push_back(cell);

  if (rms) return;
  cell.name.variant = "over_rms_norm";
  cell.bound = Bound::kBaseline;
  cell.baseline = "rms_norm/kernel";
  cell.goal = 1.15;
  cell.prepare = [=](const Arena& arena) {
    const auto norm = NormOf(arena, kind, dtype, rows);
    Work work = NormWork(norm, NormKernelOf(arena, norm));
    work.baseline = NormKernelOf(arena, NormOf(arena, NormKind::kRmsNorm, dtype, rows));
    return work;
  };
  cells.push_back(cell);
}

}  // namespace

void AddNormCells(const std::vector<int>& threads, std::vector<Cell>& cells) {
  for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    for (const DType dtype : kFloatDTypes) {
      for (const int64_t rows : kNormRows) {
        for (const int count : threads) AddNorm(kind, dtype, rows, count, cells);
      }
    }
  }
}

}  // namespace layerd::bench
