// The products of ONNX' MatMul and Gemm vectors, by the kernel, on every SIMD target.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lib/kernels/matmul.h"
#include "tests/golden/golden_files.h"
#include "tests/lib/kernels/kernel_testing.h"

namespace layerd {
namespace {

using nlohmann::json;

struct Array {
  std::vector<int64_t> shape;
  std::vector<float> data;
};

Array ReadArray(const json& tensor) { return {tensor["shape"], tensor["data"]}; }

std::vector<float> Multiply(const float* x, int64_t rows, const float* w, int64_t in, int64_t out, WeightLayout layout,
                            const float* bias) {
  const Arena arena(1);
  std::vector<float> y(rows * out);
  MatMul(arena, x, rows, {DType::kFloat32, layout, in, out, reinterpret_cast<const std::byte*>(w)}, bias, y.data());
  return y;
}

// NumPy's matmul: the last two axes are matrices, a vector is a row on the left and a column on the right, and the axes
// before are broadcast.
std::vector<float> MatMulOf(Array a, Array b) {
  if (a.shape.size() == 1) a.shape.insert(a.shape.begin(), 1);
  if (b.shape.size() == 1) b.shape.push_back(1);
  const size_t rank = std::max(a.shape.size(), b.shape.size());
  a.shape.insert(a.shape.begin(), rank - a.shape.size(), 1);
  b.shape.insert(b.shape.begin(), rank - b.shape.size(), 1);
  const int64_t rows = a.shape[rank - 2], in = a.shape[rank - 1], out = b.shape[rank - 1];
  int64_t batches = 1;
  for (size_t i = 0; i + 2 < rank; ++i) batches *= std::max(a.shape[i], b.shape[i]);
  std::vector<float> y;
  for (int64_t batch = 0; batch < batches; ++batch) {
    int64_t rest = batch, a_at = 0, b_at = 0, a_step = 1, b_step = 1;
    for (size_t i = rank - 2; i-- > 0;) {
      const int64_t index = rest % std::max(a.shape[i], b.shape[i]);
      rest /= std::max(a.shape[i], b.shape[i]);
      if (a.shape[i] > 1) a_at += index * a_step;
      if (b.shape[i] > 1) b_at += index * b_step;
      a_step *= a.shape[i];
      b_step *= b.shape[i];
    }
    const auto part = Multiply(a.data.data() + a_at * rows * in, rows, b.data.data() + b_at * in * out, in, out,
                               WeightLayout::kInOut, nullptr);
    y.insert(y.end(), part.begin(), part.end());
  }
  return y;
}

void ExpectNear(const std::vector<float>& got, const Array& expected, const std::string& name) {
  ASSERT_EQ(got.size(), expected.data.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected.data[i], 1e-6) << name << " " << i;
}

TEST(ProductsTest, OnnxMatMul) {
  LAYERD_GOLDEN_OR_SKIP(path, "data/cases/onnx_matmul.json");
  const json cases = ReadJson(path);
  ASSERT_EQ(cases.size(), 7u);
  ForEachSimd([&](Simd) {
    for (const json& one : cases) {
      ExpectNear(MatMulOf(ReadArray(one["inputs"][0]), ReadArray(one["inputs"][1])), ReadArray(one["outputs"][0]),
                 one["name"]);
    }
  });
}

TEST(ProductsTest, OnnxGemm) {
  LAYERD_GOLDEN_OR_SKIP(path, "data/cases/onnx_gemm.json");
  const json cases = ReadJson(path);
  ASSERT_EQ(cases.size(), 3u);
  ForEachSimd([&](Simd) {
    for (const json& one : cases) {
      const Array x = ReadArray(one["inputs"][0]), w = ReadArray(one["inputs"][1]);
      const bool out_in = one["attrs"].value("transB", 0) == 1;
      const std::vector<float> bias = one["inputs"].size() > 2 ? ReadArray(one["inputs"][2]).data
                                                               : std::vector<float>(w.shape[out_in ? 0 : 1], 0.0f);
      ExpectNear(Multiply(x.data.data(), x.shape[0], w.data.data(), x.shape[1], w.shape[out_in ? 0 : 1],
                          out_in ? WeightLayout::kOutIn : WeightLayout::kInOut, bias.data()),
                 ReadArray(one["outputs"][0]), one["name"]);
    }
  });
}

}  // namespace
}  // namespace layerd
