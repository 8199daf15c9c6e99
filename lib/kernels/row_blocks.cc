#include "lib/kernels/row_blocks.h"

#include "lib/kernels/convert.h"
#include "lib/kernels/strip_filling.h"

namespace layerd {
namespace {

// to[c · R + r] = from[r · stride + c] for c < columns.
template <int R>
void Interleave(const float* from, int64_t stride, int64_t columns, float* to) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int r = 0; r < R; ++r) to[c * R + r] = from[r * stride + c];
  }
}

// The same for `rows` rows of a group of `size`.
void Interleave(int64_t rows, const float* from, int64_t stride, int64_t columns, float* to, int64_t size) {
  switch (rows == size ? rows : 0) {
    case 1:
      return Interleave<1>(from, stride, columns, to);
    case 2:
      return Interleave<2>(from, stride, columns, to);
    case 3:
      return Interleave<3>(from, stride, columns, to);
    case 4:
      return Interleave<4>(from, stride, columns, to);
    case 5:
      return Interleave<5>(from, stride, columns, to);
    case 6:
      return Interleave<6>(from, stride, columns, to);
    default:
      return TransposeFloats(from, stride, rows, columns, to, size);
  }
}

}  // namespace

void RowBlocks::PutRows(int64_t row, int64_t rows, DType dtype, const std::byte* from) {
  if (dtype == DType::kFloat32) return Put(row, rows, 0, width_, reinterpret_cast<const float*>(from), width_);
  constexpr int64_t kRows = 8;
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  float widened[kRows * kMatMulBlock];
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t count = std::min(kRows, rows - r);
    for (int64_t k0 = 0; k0 < width_; k0 += kMatMulBlock) {
      const int64_t depth = Depth(k0);
      for (int64_t i = 0; i < count; ++i) {
        WidenToFloat(dtype, from + ((r + i) * width_ + k0) * size, widened + i * depth, depth);
      }
      Put(row + r, count, k0, depth, widened, depth);
    }
  }
}

void RowBlocks::Put(int64_t row, int64_t rows, int64_t column, int64_t columns, const float* from, int64_t stride) {
  if (rows <= 0) return;
  const int64_t row_end = row + rows;
  for (int64_t group = groups_.Of(row); row < row_end; ++group) {
    const int64_t size = groups_.Size(group), at = row - groups_.First(group);
    const int64_t count = std::min(size - at, row_end - row);
    for (int64_t c = 0; c < columns;) {
      const int64_t k = column + c, k0 = k / kMatMulBlock * kMatMulBlock;
      const int64_t run = std::min(columns - c, k0 + kMatMulBlock - k);
      Interleave(count, from + c, stride, run, At(k0, group) + (k - k0) * size + at, size);
      c += run;
    }
    row += count;
    from += count * stride;
  }
}

}  // namespace layerd
