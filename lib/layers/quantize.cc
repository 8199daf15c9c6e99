#include "lib/layers/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/kernels/convert.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// Reads the outputs of a float matrix, some at a time, as rows of float32. For one thread.
class OutputReader {
 public:
  static constexpr int64_t kOutputs = 32;  // at most so many at a time

  OutputReader(const Tensor& matrix, WeightLayout layout)
      : matrix_(matrix),
        out_in_(layout == WeightLayout::kOutIn),
        in_(matrix.dim(out_in_ ? 1 : 0)),
        out_(matrix.dim(out_in_ ? 0 : 1)),
        rows_(static_cast<size_t>(kOutputs * in_)) {}

  // [count][in], until the next call.
  const float* Read(int64_t first, int64_t count) {
    const int64_t size = static_cast<int64_t>(SizeOf(matrix_.dtype()));
    if (out_in_) {
      WidenToFloat(matrix_.dtype(), matrix_.data() + first * in_ * size, rows_.data(), count * in_);
      return rows_.data();
    }
    float line[kOutputs];
    for (int64_t k = 0; k < in_; ++k) {
      WidenToFloat(matrix_.dtype(), matrix_.data() + (k * out_ + first) * size, line, count);
      for (int64_t n = 0; n < count; ++n) rows_[n * in_ + k] = line[n];
    }
    return rows_.data();
  }

 private:
  const Tensor& matrix_;
  const bool out_in_;
  const int64_t in_;
  const int64_t out_;
  std::vector<float> rows_;
};

// The bits of the least float16 that is at least largest / 127.
uint16_t ScaleFor(float largest) {
  const uint16_t nearest = NarrowToFloat16(static_cast<float>(largest / 127.0));
  return WidenFloat16(nearest) * 127.0 < largest ? nearest + 1 : nearest;
}

struct Squares {
  double error = 0;
  double weight = 0;
  double max_abs_error = 0;
};

// One block of at most 32 inputs.
uint16_t QuantizeBlock(const float* w, int64_t count, std::byte* values, Squares& squares) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(w[i]));
  const uint16_t bits = ScaleFor(largest);
  const double scale = WidenFloat16(bits);
  for (int64_t i = 0; i < count; ++i) {
    // Adding 1.5 · 2⁵² puts the unit 1 at the last bit of the sum, which the addition rounds to nearest even. float64
    // tells every quotient from a tie: it is one of 24 bits by one of 11.
    const double q = bits == 0 ? 0.0 : (w[i] / scale + 0x1.8p52) - 0x1.8p52;
    values[i] = static_cast<std::byte>(static_cast<int8_t>(q));
    const double error = w[i] - scale * q;
    squares.error += error * error;
    squares.weight += static_cast<double>(w[i]) * w[i];
    squares.max_abs_error = std::max(squares.max_abs_error, std::fabs(error));
  }
  return bits;
}

// The place of the first weight that cannot be quantised, NaN among them; kNone where all can.
int64_t FindBad(const float* w, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!(std::fabs(w[i]) <= kMaxQuantizedWeight)) return i;
  }
  return kNone;
}

// √(error / of), where both are sums of squares.
double Relative(double error, double of) { return error == 0 ? 0 : std::sqrt(error / of); }

std::optional<double> OutputError(const Tensor& exact, const Tensor& got) {
  double error = 0, of = 0;
  for (int64_t i = 0; i < exact.num_elements(); ++i) {
    const double y = exact.At(i), difference = got.At(i) - y;
    error += difference * difference;
    of += y * y;
  }
  const double relative = Relative(error, of);
  return std::isfinite(relative) ? std::optional(relative) : std::nullopt;
}

}  // namespace

absl::StatusOr<QuantizedMatrix> QuantizeMatrix(const Arena& arena, const std::string& role, const Tensor& matrix,
                                               WeightLayout layout) {
  const bool out_in = layout == WeightLayout::kOutIn;
  const int64_t in = matrix.dim(out_in ? 1 : 0), out = matrix.dim(out_in ? 0 : 1);
  const int64_t blocks = (in + kScaleBlock - 1) / kScaleBlock;
  QuantizedMatrix quantized{.values = Tensor::Allocate(DType::kInt8, {out, in}),
                            .scale = Tensor::Allocate(DType::kFloat16, {out, blocks}),
                            .error = {.role = role}};
  std::vector<Squares> squares(out);  // by output, so that their sum has one order
  std::atomic<int64_t> bad{kNone};    // the least place, n · in + k
  auto* const scales = reinterpret_cast<uint16_t*>(quantized.scale.mutable_data());
  std::byte* const values = quantized.values.mutable_data();
  constexpr int64_t kOutputs = OutputReader::kOutputs;
  arena.For((out + kOutputs - 1) / kOutputs, 1, [&](int64_t begin, int64_t end) {
    OutputReader reader(matrix, layout);
    for (int64_t first = begin * kOutputs; first < std::min(out, end * kOutputs); first += kOutputs) {
      const int64_t count = std::min(kOutputs, out - first);
      const float* rows = reader.Read(first, count);
      if (const int64_t place = FindBad(rows, count * in); place != kNone) {
        int64_t least = bad.load();
        while (first * in + place < least && !bad.compare_exchange_weak(least, first * in + place)) {
        }
        return;
      }
      for (int64_t n = first; n < first + count; ++n) {
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t k = block * kScaleBlock;
          scales[n * blocks + block] = QuantizeBlock(rows + (n - first) * in + k, std::min(kScaleBlock, in - k),
                                                     values + n * in + k, squares[n]);
        }
      }
    }
  });
  if (bad != kNone) {
    const int64_t n = bad / in, k = bad % in;
    return InvalidField(absl::StrCat("weights.", role), "NOT_QUANTIZABLE",
                        absl::StrCat("expected finite weights of at most 127 · 65504 to quantise, got ",
                                     matrix.At(out_in ? n * in + k : k * out + n), " for output ", n, ", input ", k));
  }
  Squares sum;
  for (const Squares& one : squares) {
    sum.error += one.error;
    sum.weight += one.weight;
    sum.max_abs_error = std::max(sum.max_abs_error, one.max_abs_error);
  }
  quantized.error.relative_rms_error = Relative(sum.error, sum.weight);
  quantized.error.max_abs_error = sum.max_abs_error;
  return quantized;
}

absl::StatusOr<FeedForwardLayer> Quantize(const Arena& arena, const FeedForwardLayer& layer,
                                          const std::string& source_hash, const QuantizationProbe& probe) {
  const auto extent = CheckLayer(layer);
  if (!extent.ok()) return extent.status();
  FeedForwardLayer quantized = layer;
  quantized.spec.layout = WeightLayout::kOutIn;
  Quantization& told = quantized.quantization.emplace();
  told.source_hash = source_hash;
  told.rows = probe.rows;
  told.seed = probe.seed;
  for (const auto& [role, matrix, scale] : kFeedForwardMatrices) {
    const std::optional<Tensor>& from = layer.weights.*matrix;
    if (!from) continue;
    const std::string name(role);
    if (!IsFloat(from->dtype())) {
      return InvalidField(absl::StrCat("weights.", name, ".dtype"), "DTYPE_MISMATCH",
                          "expected float32, float16 or bfloat16 to quantise, got int8");
    }
    auto made = QuantizeMatrix(arena, name, *from, layer.spec.layout);
    if (!made.ok()) return made.status();
    quantized.weights.*matrix = std::move(made->values);
    quantized.weights.*scale = std::move(made->scale);
    told.matrices.push_back(std::move(made->error));
  }
  const Tensor input = SeededInput(static_cast<uint64_t>(probe.seed), DType::kFloat32, {probe.rows, extent->dim});
  const auto exact = FeedForward(arena, layer.spec, layer.weights, input, DType::kFloat32, false);
  if (!exact.ok()) return exact.status();
  const auto got = FeedForward(arena, quantized.spec, quantized.weights, input, DType::kFloat32, false);
  if (!got.ok()) return got.status();
  told.output_relative_rms_error = OutputError(exact->output, got->output);
  return quantized;
}

}  // namespace layerd
