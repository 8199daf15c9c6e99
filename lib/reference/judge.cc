#include "lib/reference/judge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "lib/reference/reference.h"

namespace layerd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMaxFloat = std::numeric_limits<float>::max();

double UlpOf(DType dtype, double exact) {
  int exponent = MinExponent(dtype);
  if (exact != 0 && std::isfinite(exact)) exponent = std::max(exponent, std::ilogb(exact));
  return std::ldexp(1.0, exponent - MantissaBits(dtype));
}

// From here on a value rounds to infinity in `dtype`: half an ulp above its largest one.
double OverflowsFrom(DType dtype) {
  return dtype == DType::kFloat16 ? 65520.0 : dtype == DType::kBFloat16 ? 0x1.FFp127 : 0x1.FFFFFFp127;
}

double RoundedForCompare(DType dtype, double exact) {
  return std::fabs(exact) >= OverflowsFrom(dtype) ? std::copysign(kInfinity, exact) : exact;
}

// |got − exact|, by the rules for what is not finite.
double AbsError(DType dtype, double got, double exact) {
  exact = RoundedForCompare(dtype, exact);
  if (std::isnan(got) || std::isnan(exact)) return std::isnan(got) && std::isnan(exact) ? 0 : kInfinity;
  if (std::isinf(got) || std::isinf(exact)) return got == exact ? 0 : kInfinity;
  return std::fabs(got - exact);
}

// Takes one element into the greatest errors. `bound` is absolute; nothing: no bound is promised for it.
void Take(StageReport& report, DType dtype, double got, double exact, std::optional<double> bound) {
  const double error = AbsError(dtype, got, exact);
  // A divisor that is no number comes of an exact value that is none: any error at all is infinite then.
  const auto ratio = [error](double divisor) { return error == 0 ? 0 : divisor > 0 ? error / divisor : kInfinity; };
  report.max_abs_error = std::max(report.max_abs_error, error);
  report.max_rel_error = std::max(report.max_rel_error, ratio(std::fabs(exact)));
  report.max_ulp_error = std::max(report.max_ulp_error, ratio(UlpOf(dtype, exact)));
  if (bound) report.max_error_over_bound = std::max(report.max_error_over_bound, ratio(*bound));
}

void Close(ErrorReport& report, StageReport stage) {
  report.within_contract = report.within_contract && stage.max_error_over_bound <= 1;
  report.stages.push_back(std::move(stage));
}

std::vector<double> Doubles(const Tensor& tensor) {
  std::vector<double> values(tensor.num_elements());
  for (int64_t i = 0; i < tensor.num_elements(); ++i) values[i] = tensor.At(i);
  return values;
}

// A product over `k` terms by N4, its bias by one more float32 rounding, and its narrowing by one to `got`'s dtype.
StageReport JudgeProduct(std::string stage, const reference::ProductReference& exact, int64_t k, bool bias,
                         const Tensor& got) {
  const double factor = (256 + std::ceil(static_cast<double>(k) / 256)) * 0x1p-24;
  StageReport report;
  report.stage = std::move(stage);
  for (int64_t i = 0; i < got.num_elements(); ++i) {
    double bound = factor * exact.magnitude[i] + static_cast<double>(k) * 0x1p-150;
    if (bias) bound += (std::fabs(exact.value[i]) + bound) * 0x1p-24 + 0x1p-150;
    if (got.dtype() != DType::kFloat32) bound += 0.5 * UlpOf(got.dtype(), std::fabs(exact.value[i]) + bound);
    // Where a partial sum may overflow, or comes near the largest value of a narrow output, nothing is promised.
    const bool may_overflow =
        std::isfinite(exact.magnitude[i]) &&
        (exact.magnitude[i] > kMaxFloat * 0.99 || std::fabs(exact.value[i]) + bound >= OverflowsFrom(got.dtype()));
    Take(report, got.dtype(), got.At(i), exact.value[i], may_overflow ? std::nullopt : std::optional(bound));
  }
  return report;
}

// The right value that `got` is nearest to, in units of that value's last place: below a power of two they are half as
// large as above it.
double NearestRight(const reference::NormalizeReference::Right& right, DType dtype, double got) {
  const auto [least, most] = std::minmax_element(right.values.begin(), right.values.end());
  if (right.and_between && got >= *least && got <= *most) return got;
  const auto ulps = [&](double exact) { return AbsError(dtype, got, exact) / UlpOf(dtype, exact); };
  return *std::min_element(right.values.begin(), right.values.end(),
                           [&](double a, double b) { return ulps(a) < ulps(b); });
}

StageReport JudgeNorm(std::string stage, const reference::NormalizeReference& exact, const Tensor& got) {
  StageReport report;
  report.stage = std::move(stage);
  for (int64_t i = 0; i < got.num_elements(); ++i) {
    const double value = got.At(i);
    const double expected = exact.right.empty() ? exact.output[i] : NearestRight(exact.right[i], got.dtype(), value);
    Take(report, got.dtype(), value, expected, 0.501 * UlpOf(got.dtype(), expected) + exact.slack[i]);
  }
  return report;
}

void TakeEndToEnd(ErrorReport& report, const Tensor& output, const std::vector<double>& exact) {
  StageReport whole;
  for (int64_t i = 0; i < output.num_elements(); ++i) Take(whole, output.dtype(), output.At(i), exact[i], std::nullopt);
  report.max_abs_error = whole.max_abs_error;
  report.max_rel_error = whole.max_rel_error;
  report.max_ulp_error = whole.max_ulp_error;
}

}  // namespace

ErrorReport JudgeNormalize(const NormalizeSpec& spec, const NormalizeInputs& inputs, const NormalizeOutputs& outputs) {
  const auto exact = reference::Normalize(spec, inputs);
  StageReport norm = JudgeNorm("norm", exact, outputs.output);
  ErrorReport report;
  report.max_abs_error = norm.max_abs_error;
  report.max_rel_error = norm.max_rel_error;
  report.max_ulp_error = norm.max_ulp_error;
  Close(report, std::move(norm));
  if (outputs.residual_sum) {
    StageReport sum;
    sum.stage = "residual_sum";
    for (size_t i = 0; i < exact.residual_sum.size(); ++i) {
      Take(sum, outputs.residual_sum->dtype(), outputs.residual_sum->At(i), exact.residual_sum[i], 0.0);
    }
    Close(report, std::move(sum));
  }
  return report;
}

ErrorReport JudgeFeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights, const Tensor& input,
                             const FeedForwardOutputs& outputs) {
  const FeedForwardExtent extent = *CheckFeedForward(spec, weights, input);
  const auto exact = reference::FeedForward(spec, weights, input);
  const bool gated = spec.form == FeedForwardForm::kGated;
  ErrorReport report;
  TakeEndToEnd(report, outputs.output, exact.output);
  if (gated) {
    const bool bias = weights.gate_bias || weights.gate_up_bias;
    Close(report, JudgeProduct("gate", exact.gate, extent.dim, bias, *outputs.gate));
  }
  Close(report, JudgeProduct("up", exact.up, extent.dim, weights.up_bias || weights.gate_up_bias, *outputs.up));

  StageReport hidden;
  hidden.stage = "hidden";
  for (int64_t i = 0; i < outputs.hidden->num_elements(); ++i) {
    const double u = outputs.up->At(i);
    const double expected =
        gated ? reference::Gate(spec, outputs.gate->At(i), u) : reference::Activate(spec.activation, u);
    Take(hidden, DType::kFloat32, outputs.hidden->At(i), expected, 2 * UlpOf(DType::kFloat32, expected));
  }
  Close(report, std::move(hidden));

  if (spec.inner_norm) {
    NormalizeSpec norm;
    norm.epsilon = spec.inner_norm->epsilon;
    NormalizeInputs inputs;
    inputs.input = *outputs.hidden;
    inputs.gamma = weights.inner_norm_gamma;
    Close(report, JudgeNorm("inner_norm", reference::Normalize(norm, inputs), *outputs.normed));
  }
  const Tensor& last = spec.inner_norm ? *outputs.normed : *outputs.hidden;
  const auto down =
      reference::Product(Doubles(last), extent.rows, *weights.down, spec.layout, weights.down_bias, weights.down_scale);
  Close(report, JudgeProduct("output", down, extent.hidden_dim, weights.down_bias.has_value(), outputs.output));
  return report;
}

}  // namespace layerd
