// Cells of one product, d → h, with weights that come with the call, in both layouts.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "bench/cell.h"
#include "bench/random_data.h"
#include "bench/shapes.h"
#include "lib/kernels/matmul.h"
#include "lib/reference/reference.h"

namespace layerd::bench {
namespace {

struct Matrix {
  FeedForwardShape shape;
  DType dtype;
  WeightLayout layout;
  RandomWeights weights;
  Tensor input;  // for the largest M
};

// Only the matrix asked for last is kept.
std::shared_ptr<const Matrix> MatrixOf(const Arena& arena, FeedForwardShape shape, DType dtype, WeightLayout layout) {
  static std::shared_ptr<const Matrix> last;
  if (last == nullptr || last->shape.dim != shape.dim || last->dtype != dtype || last->layout != layout) {
    last = nullptr;
    const double deviation = 1 / std::sqrt(static_cast<double>(shape.dim));
    const Shape lines =
        layout == WeightLayout::kOutIn ? Shape{shape.hidden_dim, shape.dim} : Shape{shape.dim, shape.hidden_dim};
    last = std::make_shared<Matrix>(Matrix{shape, dtype, layout, NormalWeights(arena, 11, dtype, lines, deviation),
                                           NormalTensor(arena, 21, DType::kFloat32, {kAllRows.back(), shape.dim})});
  }
  return last;
}

double ErrorOf(const Matrix& matrix, const float* output, int64_t rows) {
  const int64_t dim = matrix.shape.dim, hidden_dim = matrix.shape.hidden_dim;
  std::vector<double> x;
  std::vector<float> got;
  const std::vector<int64_t> some = SomeRows(rows);
  for (const int64_t row : some) {
    x.insert(x.end(), matrix.input.floats() + row * dim, matrix.input.floats() + (row + 1) * dim);
    got.insert(got.end(), output + row * hidden_dim, output + (row + 1) * hidden_dim);
  }
  return RelativeError(got, reference::Product(x, static_cast<int64_t>(some.size()), matrix.weights.values,
                                               matrix.layout, std::nullopt, matrix.weights.scale)
                                .value);
}

Work Prepare(const Arena& arena, int64_t rows, FeedForwardShape shape, DType dtype, WeightLayout layout) {
  const std::shared_ptr<const Matrix> matrix = MatrixOf(arena, shape, dtype, layout);
  const auto output = std::make_shared<Tensor>(HugeTensor(DType::kFloat32, {rows, shape.hidden_dim}));
  WeightView view{dtype, layout, shape.dim, shape.hidden_dim, matrix->weights.values.data()};
  if (matrix->weights.scale) view.scale = matrix->weights.scale->data();
  Work work;
  work.run = [&arena, matrix, output, view, rows] {
    MatMul(arena, matrix->input.floats(), rows, view, nullptr, output->mutable_floats());
  };
  work.error = [matrix, output, rows] { return ErrorOf(*matrix, output->floats(), rows); };
  work.flops = 2 * static_cast<double>(matrix->weights.values.num_elements()) * static_cast<double>(rows);
  work.bytes = matrix->weights.num_bytes() + static_cast<double>(rows * shape.dim) * static_cast<double>(sizeof(float));
  return work;
}

}  // namespace

void AddProductCells(const std::vector<int>& threads, std::vector<Cell>& cells) {
  for (const FeedForwardShape shape : kShapes) {
    for (const DType dtype : kWeightDTypes) {
      for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
        if (dtype == DType::kInt8 && layout == WeightLayout::kInOut) continue;
        for (const int count : threads) {
          for (const int64_t rows : kAllRows) {
            const CellName name{"product",
                                layout == WeightLayout::kOutIn ? "out_in" : "in_out",
                                std::string(Name(dtype)),
                                shape.dim,
                                shape.hidden_dim,
                                rows,
                                count};
            cells.push_back({.name = name, .prepare = [=](const Arena& arena) {
                               return Prepare(arena, rows, shape, dtype, layout);
                             }});
          }
        }
      }
    }
  }
}

}  // namespace layerd::bench
