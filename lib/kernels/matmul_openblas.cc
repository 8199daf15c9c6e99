#include "lib/kernels/matmul_openblas.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/kernels/matmul_internal.h"
#include "lib/kernels/openblas.h"
#include "lib/kernels/strip_filling.h"
#include "lib/kernels/strips.h"

namespace layerd {

void MatMulOpenBlas(const RowBlocks& x, int64_t group, const WeightView& w, const float* bias, int64_t begin,
                    int64_t end, float* y, int64_t y_stride) {
  const int64_t rows = x.groups().Size(group);
  const bool out_in = w.layout == WeightLayout::kOutIn;
  const int64_t stride = RowStride(w);
  const float* weights = reinterpret_cast<const float*>(w.data);
  // Calls of at most 256 of k each, the length up to which the library is known to sum in one chain.
  for (int64_t k0 = 0; k0 < w.in; k0 += kMatMulBlock) {
    openblas::Sgemm(rows, end - begin, x.Depth(k0), x.At(k0, group), rows,
                    weights + (out_in ? begin * stride + k0 : k0 * stride + begin), stride, out_in,
                    /*accumulate=*/k0 > 0, y, y_stride);
  }
  FinishSums(y, rows, end - begin, y_stride, bias == nullptr ? nullptr : bias + begin);
}

namespace {

constexpr WeightLayout kLayouts[] = {WeightLayout::kInOut, WeightLayout::kOutIn};

// So that two that differ are seen to.
std::string InFull(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}

std::string Describe(WeightLayout layout, int64_t rows, int64_t cols, int64_t depth, int64_t m, int64_t n) {
  return absl::StrCat("rows ", rows, ", out ", cols, ", in ", depth,
                      layout == WeightLayout::kInOut ? ", weights [in, out]" : ", weights [out, in]", ", at [", m, ", ",
                      n, "]");
}

// A product of matrices that are parts of larger ones: the first of the rows of x and of the columns of w.
struct Example {
  Example(int64_t max_rows, int64_t max_cols, int64_t depth)
      : in(depth), x(max_rows * depth), w(max_cols * depth), y(max_rows * max_cols), blocks(x.size()) {}

  // Fills y, as [rows, cols].
  void Multiply(WeightLayout layout, int64_t rows, int64_t cols) {
    const float* weights = w.data();  // one column after another
    if (layout == WeightLayout::kInOut) {
      in_out.resize(in * cols);
      TransposeFloats(w.data(), in, cols, in, in_out.data(), cols);
      weights = in_out.data();
    }
    RowBlocks rows_of_x(blocks.data(), rows, in, kOpenBlasRows);
    rows_of_x.PutRows(0, rows, DType::kFloat32, reinterpret_cast<const std::byte*>(x.data()));
    const WeightView view{DType::kFloat32, layout, in, cols, reinterpret_cast<const std::byte*>(weights)};
    for (int64_t group = 0; group < rows_of_x.groups().count; ++group) {
      MatMulOpenBlas(rows_of_x, group, view, nullptr, 0, cols, &y[rows_of_x.groups().First(group) * cols], cols);
    }
  }
  // The same by the scalar twin.
  std::vector<float> Expected(int64_t rows, int64_t cols) const {
    std::vector<float> expected(rows * cols);
    const WeightView view{DType::kFloat32, WeightLayout::kOutIn, in, cols,
                          reinterpret_cast<const std::byte*>(w.data())};
    MatMulScalar({x.data(), rows, view, nullptr, expected.data(), cols, 0, cols});
    return expected;
  }

  int64_t in;
  std::vector<float> x, w, y, in_out, blocks;
};

}  // namespace

absl::Status CheckOpenBlasProducts() {
  constexpr int64_t kSizes[] = {1, 3, 7, 8, 9, 16, 17, 33, 65, 100};
  std::minstd_rand random(1);
  std::uniform_int_distribution<int> small(-8, 8);
  for (int64_t depth : kSizes) {
    Example example(100, 100, depth);
    for (float& value : example.x) value = static_cast<float>(small(random));
    for (float& value : example.w) value = static_cast<float>(small(random));
    // The exact products, in integers; in float32 any order of summing gives them as well.
    std::vector<float> exact(100 * 100);
    for (int64_t m = 0; m < 100; ++m) {
      for (int64_t n = 0; n < 100; ++n) {
        int sum = 0;
        for (int64_t k = 0; k < depth; ++k) {
          sum += static_cast<int>(example.x[m * depth + k]) * static_cast<int>(example.w[n * depth + k]);
        }
        exact[m * 100 + n] = static_cast<float>(sum);
      }
    }
    for (WeightLayout layout : kLayouts) {
      for (int64_t cols : kSizes) {
        for (int64_t rows : kSizes) {
          example.Multiply(layout, rows, cols);
          for (int64_t m = 0; m < rows; ++m) {
            for (int64_t n = 0; n < cols; ++n) {
              if (example.y[m * cols + n] == exact[m * 100 + n]) continue;
              return absl::InternalError(absl::StrCat("OpenBLAS computes wrongly: an exact product of small integers ",
                                                      "differs: ", Describe(layout, rows, cols, depth, m, n), ", got ",
                                                      example.y[m * cols + n], ", expected ", exact[m * 100 + n]));
            }
          }
        }
      }
    }
  }
  return absl::OkStatus();
}

namespace {

// Compares the shapes rows × cols of one depth. By N4 an output does not depend on the shape, so one product by the
// scalar twin, of the largest shape, has the answers for all.
std::string FindDifference(int64_t depth, const std::vector<std::pair<int64_t, int64_t>>& shapes, uint32_t seed,
                           float scale = 1.0f) {
  int64_t max_rows = 0, max_cols = 0;
  for (const auto& [rows, cols] : shapes) {
    max_rows = std::max(max_rows, rows);
    max_cols = std::max(max_cols, cols);
  }
  Example example(max_rows, max_cols, depth);
  std::minstd_rand random(seed);
  std::normal_distribution<float> normal;
  for (float& value : example.x) value = scale * normal(random);
  for (float& value : example.w) value = normal(random);
  const std::vector<float> expected = example.Expected(max_rows, max_cols);
  for (WeightLayout layout : kLayouts) {
    for (const auto& [rows, cols] : shapes) {
      example.Multiply(layout, rows, cols);
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t n = 0; n < cols; ++n) {
          const float got = example.y[m * cols + n], want = expected[m * max_cols + n];
          if (std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(want)) continue;
          return absl::StrCat(
              "its sums are not in the order that N1 needs: ", Describe(layout, rows, cols, depth, m, n), ", got ",
              InFull(got), ", expected ", InFull(want));
        }
      }
    }
  }
  return "";
}

}  // namespace

std::string FindOpenBlasDifference() {
  constexpr int64_t kLargest = 65;
  // Every number of rows with some numbers of columns and the other way round. Edge tiles are of the sizes below 4, 8,
  // 16, 32 and 64, and combinations of them.
  constexpr int64_t kSome[] = {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 48, 65};
  constexpr int64_t kDepths[] = {1,  2,  3,   4,   5,   7,   8,   9,   13,  16,  17,  31,  32,  33,  47, 64,
                                 65, 97, 127, 128, 129, 191, 200, 255, 256, 257, 300, 511, 512, 513, 700};
  uint32_t turn = 0;
  for (int64_t depth : kDepths) {
    // Of all these shapes, a fourth for each depth, another fourth for the next.
    std::vector<std::pair<int64_t, int64_t>> shapes = {{kLargest, kLargest}};
    for (int64_t some : kSome) {
      for (int64_t size = 1 + (some + turn) % 4; size <= kLargest; size += 4) {
        shapes.emplace_back(size, some);
        shapes.emplace_back(some, size);
      }
    }
    if (std::string difference = FindDifference(depth, shapes, ++turn); !difference.empty()) return difference;
  }
  // Denormal sums: a build that flushes them to zero does not follow the order. (Few, as they take 100 times as long.)
  if (std::string difference = FindDifference(3, {{1, 1}, {12, 16}, {65, 65}}, ++turn, 0x1p-130f);
      !difference.empty()) {
    return difference;
  }
  // Tiles as large as those of real products, where the library divides rows and columns into blocks of its own.
  for (const auto& shape :
       {std::pair{kOpenBlasRows, int64_t{48}}, {int64_t{301}, kOpenBlasCols + 5}, {int64_t{12}, 1024}}) {
    if (std::string difference = FindDifference(kMatMulBlock, {shape}, ++turn); !difference.empty()) return difference;
  }
  return "";
}

}  // namespace layerd
