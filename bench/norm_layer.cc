#include "bench/norm_layer.h"

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "bench/random_data.h"
#include "bench/shapes.h"
#include "lib/kernels/normalize_rows.h"
#include "lib/reference/reference.h"

namespace layerd::bench {

std::shared_ptr<NormUnderTest> NormOf(const Arena& arena, NormKind kind, DType dtype, int64_t rows) {
  auto norm = std::make_shared<NormUnderTest>();
  norm->spec.kind = kind;
  norm->spec.rounding = NormRounding::kAfterGamma;
  norm->inputs.input = NormalTensor(arena, 1, dtype, {rows, kNormDim});
  norm->inputs.gamma = NormalTensor(arena, 2, DType::kFloat32, {kNormDim});
  if (kind == NormKind::kLayerNorm) norm->inputs.beta = NormalTensor(arena, 3, DType::kFloat32, {kNormDim});
  return norm;
}

// The kernel, its rows divided and its output streamed as the layer does.
std::function<void()> NormKernelOf(const Arena& arena, const std::shared_ptr<NormUnderTest>& norm) {
  const Tensor& input = norm->inputs.input;
  norm->output = HugeTensor(input.dtype(), input.shape());
  const NormalizeRowsArgs args{.kind = norm->spec.kind,
                               .epsilon = EpsilonOf(norm->spec),
                               .dim = kNormDim,
                               .group_size = kNormDim,
                               .input_dtype = input.dtype(),
                               .output_dtype = input.dtype(),
                               .input = input.data(),
                               .gamma = norm->inputs.gamma->floats(),
                               .beta = norm->inputs.beta ? norm->inputs.beta->floats() : nullptr,
                               .output = norm->output.mutable_data(),
                               .stream_output = IsWorthStreaming(static_cast<int64_t>(norm->output.num_bytes()))};
  return [&arena, norm, args] { NormalizeRows(arena, args, norm->inputs.input.dim(0)); };
}

std::function<void()> NormLayerOf(const Arena& arena, const std::shared_ptr<NormUnderTest>& norm) {
  return [&arena, norm] {
    norm->output = Tensor();  // so that no two answers are held
    norm->output = Normalize(arena, norm->spec, norm->inputs, std::nullopt, false)->output;
  };
}

double NormError(const NormUnderTest& norm) {
  std::vector<float> got;
  std::vector<double> want;
  for (const int64_t row : SomeRows(norm.output.dim(0))) {
    NormalizeInputs inputs = norm.inputs;
    const size_t bytes = norm.output.num_bytes() / static_cast<size_t>(norm.output.dim(0));
    inputs.input = *Tensor::Adopt(norm.inputs.input.dtype(), {1, kNormDim}, std::make_shared<Tensor>(norm.inputs.input),
                                  norm.inputs.input.bytes().subspan(static_cast<size_t>(row) * bytes, bytes));
    const std::vector<double> reference = reference::Normalize(norm.spec, inputs).output;
    want.insert(want.end(), reference.begin(), reference.end());
    for (int64_t i = 0; i < kNormDim; ++i) got.push_back(norm.output.At(row * kNormDim + i));
  }
  return RelativeError(got, want);
}

Work NormWork(const std::shared_ptr<NormUnderTest>& norm, std::function<void()> run) {
  Work work;
  work.run = std::move(run);
  work.error = [norm] { return NormError(*norm); };
  const DType dtype = norm->inputs.input.dtype();
  // Half a unit in the last place of values of up to about 20 times the rms.
  work.max_error = dtype == DType::kFloat32 ? 2e-6 : dtype == DType::kFloat16 ? 1e-2 : 1e-1;
  work.bytes = 2 * static_cast<double>(norm->inputs.input.num_bytes());
  return work;
}

}  // namespace layerd::bench
