// The scalar twin of normalize_rows.cc: the same operations in the same order, so the same bits.
#include <algorithm>
#include <bit>
#include <cstring>

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

// x · scale of one element, and silu of its gate (1 where there is none). Writes the residual's sum as it passes.
struct Opened {
  double x, gate;
};

Opened Open(const NormalizeRowsArgs& args, int64_t at, double scale) {
  float value = LoadAsFloat(args.input_dtype, args.input, at);
  if (args.residual != nullptr) {
    value = ToFloat32WithOneNan(value + LoadAsFloat(args.input_dtype, args.residual, at));
    StoreFromFloat(args.input_dtype, value, args.residual_sum, at);
    value = RoundTo(args.input_dtype, value);
  }
  Opened opened = {value, 1.0};
  if (args.gate != nullptr) {
    const float gate = LoadAsFloat(args.input_dtype, args.gate, at);
    ActivateFloat64Scalar({Activation::kSilu}, &gate, &opened.gate, 1);
  }
  if (HasGate(args, GatePosition::kFirst)) opened.x = opened.x * scale * opened.gate;
  return opened;
}

}  // namespace

void SumBlocksScalar(const NormalizeRowsArgs& args, int64_t group, const Terms& terms, int64_t begin, int64_t end,
                     TermSums* sums) {
  const int64_t first = GroupAt(args, group).first;
  for (int64_t block = begin; block < end; ++block) {
    double values[kAccumulators] = {}, squares[kAccumulators] = {};
    const int64_t block_end = std::min(args.group_size, (block + 1) * kSumBlock);
    for (int64_t i = block * kSumBlock; i < block_end; ++i) {
      const int64_t at = i % kAccumulators;
      double x = Open(args, first + i, terms.scale).x;
      if (terms.term == SumTerm::kCentred) x -= terms.center;
      if (terms.term != SumTerm::kSquare) values[at] += x;
      squares[at] = std::fma(x, x, squares[at]);
    }
    sums[block - begin] = {SumTree(values), SumTree(squares)};
  }
}

void ApplyBlocksScalar(const NormalizeRowsArgs& args, int64_t group, const GroupStatistics& statistics, int64_t begin,
                       int64_t end) {
  const NormalizeGroup at = GroupAt(args, group);
  const double gamma_offset = GammaOffset(args);
  const int64_t last = std::min(args.group_size, end * kSumBlock);
  for (int64_t i = begin * kSumBlock; i < last; ++i) {
    const Opened opened = Open(args, at.first + i, statistics.scale);
    double y = (opened.x - statistics.mean) * statistics.inverse;
    if (RoundsBeforeGamma(args)) y = RoundFloat64(args.input_dtype, y);
    const double gamma = args.gamma == nullptr ? 1.0 : args.gamma[at.offset + i] + gamma_offset;
    if (args.beta != nullptr) {
      y = std::fma(y, gamma, static_cast<double>(args.beta[at.offset + i]));
    } else {
      y *= gamma;
    }
    if (HasGate(args, GatePosition::kLast)) {
      if (RoundsBeforeGamma(args)) y = RoundFloat64(args.input_dtype, y);
      y *= opened.gate;
    }
    StoreFloat64(args.output_dtype, y, args.output, at.first + i);
  }
}

void NormalizeGroupsScalar(const NormalizeRowsArgs& args, int64_t begin, int64_t end) {
  const int64_t blocks = BlocksOf(args);
  for (int64_t group = begin; group < end; ++group) {
    const GroupStatistics statistics = StatisticsBy(args, [&](const Terms& terms) {
      TermSums total;
      for (int64_t block = 0; block < blocks; ++block) {
        TermSums sums;
        SumBlocksScalar(args, group, terms, block, block + 1, &sums);
        total.Add(sums);
      }
      return total;
    });
    WriteStatistics(args, group, statistics);
    ApplyBlocksScalar(args, group, statistics, 0, blocks);
  }
}

}  // namespace layerd
