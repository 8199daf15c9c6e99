// The rows of x as the products take them: by blocks of 256 inputs and groups of rows, and within a group input by input,
// so that a kernel that sums a group of rows reads one stream.
//
// For block k0 and group g of size R, x[row + r][k0 + k] is at data[k0 · rows + row · depth + k · R + r], where `row` is
// the group's first row and `depth` the block's length. One row alone lies as it always does.
#ifndef LAYERD_LIB_KERNELS_ROW_BLOCKS_H_
#define LAYERD_LIB_KERNELS_ROW_BLOCKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lib/base/dtype.h"
#include "lib/base/parallel.h"
#include "lib/kernels/matmul_internal.h"

namespace layerd {

// Rows that a kernel sums at once; strips.cc says by how many outputs.
inline constexpr int64_t kGroupRows = 14;
// Up to kFewRows rows go in one group, so that narrow weights are widened once and in registers, or in groups of
// kFewRowsGroup, so that two strips are read at a time: where float32 weights come from memory, that is faster.
inline constexpr int64_t kFewRows = 16;
inline constexpr int64_t kFewRowsGroup = 6;

// Rows in as few groups of up to `most` as there can be, of sizes that differ by one at most, the larger ones first: a
// last group of a single row would wait for the latency of its FMAs.
struct RowGroups {
  RowGroups(int64_t all, int64_t most)
      : rows(all), count((all + most - 1) / most), size(count == 0 ? 0 : all / count), larger(all - size * count) {}
  int64_t First(int64_t group) const { return group * size + std::min(group, larger); }
  int64_t Size(int64_t group) const { return group < larger ? size + 1 : size; }
  // The group that holds a row.
  int64_t Of(int64_t row) const {
    return row < larger * (size + 1) ? row / (size + 1) : larger + (row - larger * (size + 1)) / size;
  }

  int64_t rows;
  int64_t count;
  int64_t size;    // of the smaller groups
  int64_t larger;  // groups that have a row more
};

// A view of rows · width floats. Threads: const access from any; Put…() for different rows or columns from several.
class RowBlocks {
 public:
  // In groups of up to `group_rows` (ProductGroupRows() knows how many are best).
  RowBlocks(float* data, int64_t rows, int64_t width, int64_t group_rows)
      : data_(data), group_rows_(group_rows), groups_(rows, group_rows), width_(width) {}

  int64_t group_rows() const { return group_rows_; }
  const RowGroups& groups() const { return groups_; }
  int64_t rows() const { return groups_.rows; }
  int64_t width() const { return width_; }
  int64_t Depth(int64_t k0) const { return std::min(kMatMulBlock, width_ - k0); }

  // The first value of `group` in the block that begins at k0.
  float* At(int64_t k0, int64_t group) { return data_ + k0 * rows() + groups_.First(group) * Depth(k0); }
  const float* At(int64_t k0, int64_t group) const { return const_cast<RowBlocks*>(this)->At(k0, group); }

  // Puts `rows` rows from `row` on out of a row-major matrix of `dtype` that begins with them.
  void PutRows(int64_t row, int64_t rows, DType dtype, const std::byte* from);
  // Puts columns [column, column + columns) of them; `from` is the first value, its rows `stride` floats apart.
  void Put(int64_t row, int64_t rows, int64_t column, int64_t columns, const float* from, int64_t stride);

 private:
  float* data_;
  int64_t group_rows_;
  RowGroups groups_;
  int64_t width_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_ROW_BLOCKS_H_
