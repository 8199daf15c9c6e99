#include "lib/reference/reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

namespace layerd::reference {
namespace {

long double Sigmoid(long double x) { return 1.0L / (1.0L + std::exp(-x)); }

// x·σ(y), with the limit 0 of its sign where σ underflows, and never 0·∞.
long double TimesSigmoid(long double x, long double y) {
  if (y < -11000.0L) return std::copysign(0.0L, x);  // e^y is below every long double
  if (y < 0) {
    const long double e = std::exp(y);
    return x * e / (1.0L + e);
  }
  return x * Sigmoid(y);
}

// The distance of two neighbours of a 16-bit dtype about `value`; about the largest where it is infinite.
double UnitOf(DType dtype, double value) {
  const int least = MinExponent(dtype), most = dtype == DType::kFloat16 ? 15 : 127;
  return std::ldexp(1.0, (value == 0 ? least : std::clamp(std::ilogb(value), least, most)) - MantissaBits(dtype));
}

// `value` rounded to a 16-bit dtype once, to nearest, ties to even. By way of float32 it would be rounded twice.
double Rounded(DType dtype, double value) {
  if (!std::isfinite(value)) return value;
  const double unit = UnitOf(dtype, value);
  const double rounded = std::nearbyint(value / unit) * unit;
  const double largest = dtype == DType::kFloat16 ? 65504.0 : 0x1.FEp127;
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, value) : rounded;
}

// float64's own error, generously: what lies nearer to a tie than this part of itself may be rounded to either side.
constexpr double kDoubt = 0x1p-49;

std::vector<double> Doubles(const Tensor& tensor) {
  std::vector<double> values(tensor.num_elements());
  for (int64_t i = 0; i < tensor.num_elements(); ++i) values[i] = tensor.At(i);
  return values;
}

}  // namespace

namespace {

double ActivateOrUnderflow(const ActivationFunction& act, double x) {
  const long double v = x;
  if (std::isnan(x)) return x;
  switch (act.kind) {
    case Activation::kIdentity:
      return x;
    case Activation::kSigmoid:
      return static_cast<double>(Sigmoid(v));
    case Activation::kRelu:
      return x > 0 ? x : 0.0;
    case Activation::kReluSquared:
      return x > 0 ? x * x : 0.0;
    case Activation::kGelu:
      if (x == -INFINITY) return -0.0;
      return static_cast<double>(v * 0.5L * std::erfc(-v / std::numbers::sqrt2_v<long double>));
    case Activation::kGeluTanh: {
      const long double inner = std::sqrt(2.0L * std::numbers::inv_pi_v<long double>) * (v + 0.044715L * v * v * v);
      return static_cast<double>(TimesSigmoid(v, 2.0L * inner));
    }
    case Activation::kQuickGelu:
      return static_cast<double>(TimesSigmoid(v, static_cast<long double>(1.702) * v));
    case Activation::kSilu:
      return static_cast<double>(TimesSigmoid(v, act.beta == 0 ? 0.0L : static_cast<long double>(act.beta) * v));
  }
  return NAN;
}

}  // namespace

double Activate(const ActivationFunction& act, double x) {
  const double value = ActivateOrUnderflow(act, x);
  const bool has_zeros = act.kind == Activation::kRelu || act.kind == Activation::kReluSquared;
  if (value != 0 || x == 0 || std::isinf(x) || has_zeros) return value;
  return std::copysign(std::numeric_limits<double>::denorm_min(), value);
}

double Gate(const FeedForwardSpec& spec, double gate, double up) {
  if (spec.gate_max && gate > static_cast<float>(*spec.gate_max)) gate = static_cast<float>(*spec.gate_max);
  if (spec.up_limit) {
    const double limit = static_cast<float>(*spec.up_limit);
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
  }
  return Activate(spec.activation, gate) * (up + static_cast<float>(spec.up_offset));
}

NormalizeReference Normalize(const NormalizeSpec& spec, const NormalizeInputs& inputs) {
  const NormalizeExtent extent = *CheckNormalize(spec, inputs);
  const DType dtype = inputs.input.dtype();
  const bool rounds = spec.rounding == NormRounding::kBeforeGamma && dtype != DType::kFloat32;
  const bool layer_norm = spec.kind == NormKind::kLayerNorm;
  const double d = static_cast<double>(extent.group_size);
  const int64_t n = inputs.input.num_elements();
  NormalizeReference result;
  result.output.resize(n);
  if (rounds) result.right.resize(n);
  result.slack.resize(n);
  if (inputs.residual) result.residual_sum.resize(n);
  if (n == 0) return result;  // the width of no rows may be anything

  std::vector<long double> x(extent.group_size);
  for (int64_t start = 0; start < n; start += extent.group_size) {
    long double largest = 0;
    for (int64_t i = 0; i < extent.group_size; ++i) {
      float value = inputs.input.At(start + i);
      if (inputs.residual) {
        value = RoundTo(dtype, value + inputs.residual->At(start + i));
        result.residual_sum[start + i] = value;
      }
      x[i] = value;
      if (spec.gate_position == GatePosition::kFirst) {
        x[i] *= Activate({Activation::kSilu}, inputs.gate->At(start + i));
      }
      largest = std::max(largest, std::fabs(x[i]));
    }
    long double mean = 0, squares = 0;
    for (int round = 0; layer_norm && round < 3; ++round) {  // until only the rounding of the mean itself is left
      long double rest = 0;
      for (const long double v : x) rest += v - mean;
      mean += rest / d;
    }
    for (const long double v : x) squares += (v - mean) * (v - mean);
    const long double under_root = squares / d + EpsilonOf(spec);
    const long double r = under_root == 0 ? 0.0L : 1.0L / std::sqrt(under_root);
    const double allowed = (d / 16 + 8) * 0x1p-52;

    const double cancelled = static_cast<double>(allowed * largest * r);

    for (int64_t i = 0; i < extent.group_size; ++i) {
      const int64_t at = start + i;
      const int64_t column = at % extent.dim;
      const double gamma = inputs.gamma ? inputs.gamma->At(column) + spec.gamma_offset : 1.0;
      const double beta = inputs.beta ? inputs.beta->At(column) : 0.0;
      const double exact_n = static_cast<double>((x[i] - mean) * r);
      const double gate =
          spec.gate_position == GatePosition::kLast ? Activate({Activation::kSilu}, inputs.gate->At(at)) : 1.0;
      const double rounded_n = rounds ? Rounded(dtype, exact_n) : exact_n;
      const bool rounds_twice = rounds && spec.gate_position == GatePosition::kLast;
      const double before_gate = rounded_n * gamma + beta;
      result.output[at] = (rounds_twice ? Rounded(dtype, before_gate) : before_gate) * gate;
      if (rounds) {
        const double doubt = std::fabs(exact_n) * kDoubt + (layer_norm ? cancelled : 0.0);
        const double least = Rounded(dtype, exact_n - doubt), most = Rounded(dtype, exact_n + doubt);
        NormalizeReference::Right& right = result.right[at];
        right.and_between = most - least > std::min(UnitOf(dtype, least), UnitOf(dtype, most));
        int count = 0;
        for (const double n_side : {least, most}) {
          const double value = n_side * gamma + beta;
          for (const double towards : {-kDoubt, kDoubt}) {
            right.values[count++] = (rounds_twice ? Rounded(dtype, value + towards * std::fabs(value)) : value) * gate;
          }
        }
      }
      // Where terms cancel, float64's roundings of them are left: the mean's, and n · γ's beside β.
      if (layer_norm || beta != 0) {
        const double of_n = layer_norm ? cancelled : allowed * std::fabs(exact_n);
        result.slack[at] = (of_n * std::fabs(gamma) + allowed * std::fabs(beta)) * std::fabs(gate);
      }
    }
  }
  return result;
}

ProductReference Product(const std::vector<double>& x, int64_t rows, const Tensor& weights, WeightLayout layout,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& scale) {
  const bool out_in = layout == WeightLayout::kOutIn;
  const int64_t in = weights.dim(out_in ? 1 : 0), out = weights.dim(out_in ? 0 : 1);
  ProductReference result;
  result.value.assign(rows * out, 0.0);
  result.magnitude.assign(rows * out, 0.0);
  if (rows == 0) return result;
  // The matrix is widened a few of its rows at a time, and each meets every row of x while it is in the cache; the order of
  // a float64 sum does not matter here.
  constexpr int64_t kLines = 64;
  const int64_t lines = weights.dim(0), width = weights.dim(1);
  std::vector<double> widened(std::min(kLines, lines) * width);
  for (int64_t first = 0; first < lines; first += kLines) {
    const int64_t count = std::min(kLines, lines - first);
    for (int64_t i = 0; i < count * width; ++i) widened[i] = weights.At(first * width + i);
    for (int64_t i = 0; scale && i < count * width; ++i) {
      widened[i] *= scale->At((first + i / width) * scale->dim(1) + i % width / kScaleBlock);
    }
    for (int64_t m = 0; m < rows; ++m) {
      double* value = &result.value[m * out];
      double* magnitude = &result.magnitude[m * out];
      for (int64_t line = 0; line < count; ++line) {
        const double* w = &widened[line * width];
        if (out_in) {  // a line has the weights of one output
          double sum = 0, absolute_sum = 0;
          for (int64_t k = 0; k < in; ++k) {
            sum += x[m * in + k] * w[k];
            absolute_sum += std::fabs(x[m * in + k] * w[k]);
          }
          value[first + line] = sum;
          magnitude[first + line] = absolute_sum;
        } else {  // a line has the weights of one input
          const double x_k = x[m * in + first + line];
          for (int64_t n = 0; n < out; ++n) {
            value[n] += x_k * w[n];
            magnitude[n] += std::fabs(x_k * w[n]);
          }
        }
      }
    }
  }
  if (bias) {
    for (int64_t i = 0; i < rows * out; ++i) result.value[i] += bias->At(i % out);
  }
  return result;
}

Unpacked Unpack(GateUpPacking packing, WeightLayout layout, const Tensor& packed) {
  // The axis that the outputs lie along: 0 for a vector and for [out, in], 1 for [in, out].
  const int axis = packed.rank() == 1 || layout == WeightLayout::kOutIn ? 0 : 1;
  const int64_t hidden = packed.dim(axis) / 2;
  Shape shape = packed.shape();
  shape[axis] = hidden;
  Unpacked result{Tensor::Allocate(packed.dtype(), shape), Tensor::Allocate(packed.dtype(), shape)};
  const int64_t inner = axis == 0 && packed.rank() == 2 ? packed.dim(1) : 1;
  const int64_t outer = axis == 1 ? packed.dim(0) : 1;
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t h = 0; h < hidden; ++h) {
      for (int64_t i = 0; i < inner; ++i) {
        const int64_t gate = packing == GateUpPacking::kHalves ? h : 2 * h;
        const int64_t up = packing == GateUpPacking::kHalves ? hidden + h : 2 * h + 1;
        const int64_t to = (o * hidden + h) * inner + i;
        StoreFromFloat(packed.dtype(), packed.At((o * 2 * hidden + gate) * inner + i), result.gate.mutable_data(), to);
        StoreFromFloat(packed.dtype(), packed.At((o * 2 * hidden + up) * inner + i), result.up.mutable_data(), to);
      }
    }
  }
  return result;
}

FeedForwardReference FeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights, const Tensor& input) {
  const FeedForwardExtent extent = *CheckFeedForward(spec, weights, input);
  const std::vector<double> x = Doubles(input);
  FeedForwardReference result;
  if (spec.form == FeedForwardForm::kPlain) {
    result.up = Product(x, extent.rows, *weights.up, spec.layout, weights.up_bias, weights.up_scale);
    for (const double u : result.up.value) result.hidden.push_back(Activate(spec.activation, u));
  } else {
    Unpacked matrices;
    std::optional<Tensor> gate_bias = weights.gate_bias, up_bias = weights.up_bias;
    std::optional<Tensor> gate_scale = weights.gate_scale, up_scale = weights.up_scale;
    if (spec.packing == GateUpPacking::kSeparate) {
      matrices = {*weights.gate, *weights.up};
    } else {
      matrices = Unpack(spec.packing, spec.layout, *weights.gate_up);
      if (weights.gate_up_bias) {
        const Unpacked biases = Unpack(spec.packing, spec.layout, *weights.gate_up_bias);
        gate_bias = biases.gate;
        up_bias = biases.up;
      }
      if (weights.gate_up_scale) {
        const Unpacked scales = Unpack(spec.packing, spec.layout, *weights.gate_up_scale);
        gate_scale = scales.gate;
        up_scale = scales.up;
      }
    }
    result.gate = Product(x, extent.rows, matrices.gate, spec.layout, gate_bias, gate_scale);
    result.up = Product(x, extent.rows, matrices.up, spec.layout, up_bias, up_scale);
    for (size_t i = 0; i < result.up.value.size(); ++i) {
      result.hidden.push_back(Gate(spec, result.gate.value[i], result.up.value[i]));
    }
  }
  if (spec.inner_norm) {
    const double epsilon = spec.inner_norm->epsilon.value_or(1e-6);
    const int64_t h = extent.hidden_dim;
    result.normed.resize(result.hidden.size());
    for (int64_t row = 0; row < extent.rows; ++row) {
      long double squares = 0;
      for (int64_t i = 0; i < h; ++i) {
        squares += static_cast<long double>(result.hidden[row * h + i]) * result.hidden[row * h + i];
      }
      const double under_root = static_cast<double>(squares / h + epsilon);
      const double r = under_root == 0 ? 0.0 : 1.0 / std::sqrt(under_root);
      for (int64_t i = 0; i < h; ++i) {
        const double gamma = weights.inner_norm_gamma ? weights.inner_norm_gamma->At(i) : 1.0;
        result.normed[row * h + i] = result.hidden[row * h + i] * r * gamma;
      }
    }
  }
  const std::vector<double>& last = spec.inner_norm ? result.normed : result.hidden;
  result.output = Product(last, extent.rows, *weights.down, spec.layout, weights.down_bias, weights.down_scale).value;
  return result;
}

}  // namespace layerd::reference
