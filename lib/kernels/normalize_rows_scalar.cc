// The scalar twin of normalize_rows.cc: the same operations in the same order, so the same bits.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "lib/kernels/activation_internal.h"
#include "lib/kernels/narrow_format.h"
#include "lib/kernels/normalize_rows_internal.h"

namespace layerd {
namespace {

// |value| rounded to a 16-bit dtype at once; convert-inl.h says how.
struct RoundedMagnitude {
  double scale, base, sum;
};

RoundedMagnitude RoundMagnitude(const NarrowFormat& format, double value) {
  const double magnitude = std::min(std::fabs(value), format.beyond);
  const double exponent = std::bit_cast<double>(std::bit_cast<uint64_t>(magnitude) & kFloat64Exponent);
  const double scale = std::max(exponent, format.least_normal);
  const double base = scale * format.base_over_scale;
  return {scale, base, magnitude + base};
}

double RoundFloat64(DType dtype, double value) {
  const NarrowFormat format = NarrowFormatOf(dtype);
  if (std::isnan(value)) return value;
  const RoundedMagnitude rounded = RoundMagnitude(format, value);
  const double magnitude = rounded.sum - rounded.base;
  return std::copysign(magnitude >= format.beyond ? std::numeric_limits<double>::infinity() : magnitude, value);
}

uint16_t NarrowFloat64(DType dtype, double value) {
  const NarrowFormat format = NarrowFormatOf(dtype);
  if (std::isnan(value)) return format.quiet_nan;
  const RoundedMagnitude rounded = RoundMagnitude(format, value);
  const uint64_t units = std::bit_cast<uint64_t>(rounded.sum) - std::bit_cast<uint64_t>(rounded.base);
  const uint64_t above_least = std::bit_cast<uint64_t>(rounded.scale) - std::bit_cast<uint64_t>(format.least_normal);
  const uint64_t sign = (std::bit_cast<uint64_t>(value) >> 48) & 0x8000;
  return static_cast<uint16_t>((units + (above_least >> format.dropped_bits)) | sign);
}

void StoreFloat64(DType dtype, double value, std::byte* to, int64_t index) {
  if (dtype == DType::kFloat32) return StoreFromFloat(dtype, ToFloat32WithOneNan(value), to, index);
  const uint16_t bits = NarrowFloat64(dtype, value);
  std::memcpy(to + index * 2, &bits, 2);
}

template <class Term>
double Sum(int64_t n, const Term& add_term) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    double accumulators[kAccumulators] = {};
    const int64_t end = std::min(n, begin + kSumBlock);
    for (int64_t i = begin; i < end; ++i) {
      double& accumulator = accumulators[(i - begin) % kAccumulators];
      accumulator = add_term(i, accumulator);
    }
    total += SumTree(accumulators);
  }
  return total;
}

void NormalizeOne(const NormalizeRowsArgs& args, const NormalizeGroup& group, double* x, double* gate) {
  const int64_t n = args.group_size;
  for (int64_t i = 0; i < n; ++i) {
    float value = LoadAsFloat(args.input_dtype, args.input, group.first + i);
    if (args.residual != nullptr) {
      value = ToFloat32WithOneNan(value + LoadAsFloat(args.input_dtype, args.residual, group.first + i));
      StoreFromFloat(args.input_dtype, value, args.residual_sum, group.first + i);
      value = RoundTo(args.input_dtype, value);
    }
    x[i] = value;
    if (gate != nullptr) {
      const float opening = LoadAsFloat(args.input_dtype, args.gate, group.first + i);
      ActivateFloat64Scalar({Activation::kSilu}, &opening, &gate[i], 1);
    }
    if (HasGate(args, GatePosition::kFirst)) x[i] *= gate[i];
  }

  double mean = 0;
  if (args.kind == NormKind::kLayerNorm) {
    mean = Sum(n, [&](int64_t i, double sum) { return sum + x[i]; }) / static_cast<double>(n);
    if (args.mean != nullptr) args.mean[group.index] = ToFloat32WithOneNan(mean);
  }
  const double squares = Sum(n, [&](int64_t i, double sum) {
    const double centred = x[i] - mean;
    return std::fma(centred, centred, sum);
  });
  const double inverse = InverseRoot(squares / static_cast<double>(n), args.epsilon);
  if (args.inverse != nullptr) args.inverse[group.index] = ToFloat32WithOneNan(inverse);

  const double gamma_offset = args.gamma_offset == 0 ? -0.0 : args.gamma_offset;
  for (int64_t i = 0; i < n; ++i) {
    double y = (x[i] - mean) * inverse;
    if (RoundsBeforeGamma(args)) y = RoundFloat64(args.input_dtype, y);
    const double gamma = args.gamma == nullptr ? 1.0 : args.gamma[group.offset + i] + gamma_offset;
    if (args.beta != nullptr) {
      y = std::fma(y, gamma, static_cast<double>(args.beta[group.offset + i]));
    } else {
      y *= gamma;
    }
    if (HasGate(args, GatePosition::kLast)) {
      if (RoundsBeforeGamma(args)) y = RoundFloat64(args.input_dtype, y);
      y *= gate[i];
    }
    StoreFloat64(args.output_dtype, y, args.output, group.first + i);
  }
}

}  // namespace

void NormalizeRowsScalar(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end) {
  const bool gated = HasGate(args, GatePosition::kFirst) || HasGate(args, GatePosition::kLast);
  std::vector<double> x(static_cast<size_t>(args.group_size));
  std::vector<double> gate(gated ? x.size() : 0);
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t offset = 0; offset < args.dim; offset += args.group_size) {
      NormalizeOne(args, GroupAt(args, row, offset), x.data(), gated ? gate.data() : nullptr);
    }
  }
}

}  // namespace layerd
