#include "lib/kernels/normalize_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "lib/kernels/activation_internal.h"
#include "lib/kernels/convert.h"
#include "lib/kernels/highway_targets.h"
#include "lib/kernels/normalize_rows_internal.h"
#include "lib/kernels/simd.h"

// The order of these matters:
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lib/kernels/normalize_rows.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

#if LAYERD_BASELINE_TARGET

void NormalizeVectors(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end) {
  NormalizeRowsScalar(args, row_begin, row_end);
}

#else

using D = hn::CappedTag<double, 8>;
using V = hn::Vec<D>;
inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));
inline constexpr int64_t kVectors = kAccumulators / kLanes;

// One element as float64.
HWY_INLINE double Element(const double* x) { return *x; }
HWY_INLINE double Element(const float* x) { return *x; }
HWY_INLINE double Element(const hwy::float16_t* x) {
  return LoadAsFloat(DType::kFloat16, reinterpret_cast<const std::byte*>(x), 0);
}
HWY_INLINE double Element(const hwy::bfloat16_t* x) {
  return LoadAsFloat(DType::kBFloat16, reinterpret_cast<const std::byte*>(x), 0);
}

enum class Term { kValue, kSquare, kCentredSquare };

// The sum of x, x² or (x − mean)² over at most kSumBlock elements.
template <Term kTerm, class T>
double SumBlock(const T* x, int64_t n, double mean) {
  const D d;
  const V center = hn::Set(d, mean);
  V sums[kVectors];
  for (int64_t a = 0; a < kVectors; ++a) sums[a] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kAccumulators <= n; i += kAccumulators) {
    for (int64_t a = 0; a < kVectors; ++a) {
      V value = LoadFloat64(d, x + i + a * kLanes);
      if (kTerm == Term::kCentredSquare) value = hn::Sub(value, center);
      sums[a] = kTerm == Term::kValue ? hn::Add(sums[a], value) : hn::MulAdd(value, value, sums[a]);
    }
  }
  double accumulators[kAccumulators];
  for (int64_t a = 0; a < kVectors; ++a) hn::StoreU(sums[a], d, accumulators + a * kLanes);
  for (int64_t a = 0; i < n; ++i, ++a) {
    const double value = Element(x + i) - (kTerm == Term::kCentredSquare ? mean : 0.0);
    accumulators[a] = kTerm == Term::kValue ? accumulators[a] + value : std::fma(value, value, accumulators[a]);
  }
  return SumTree(accumulators);
}

template <Term kTerm, class T>
double Mean(const T* x, int64_t n, double mean) {
  double total = 0;
  for (int64_t i = 0; i < n; i += kSumBlock) total += SumBlock<kTerm>(x + i, std::min(kSumBlock, n - i), mean);
  return total / static_cast<double>(n);
}

// What is done with a group once its statistics are known.
struct Formula {
  double mean;
  double inverse;
  double gamma_offset;
  const float* gamma;  // null: 1
  const float* beta;   // null: none
  const double* gate;  // silu of the gate, to multiply with last; null: none
  DType round_to;      // n is rounded to it before γ, and y before the gate; float32: not rounded
};

HWY_INLINE V RoundFloat64To(V value, DType dtype) {
  const D d;
  if (dtype == DType::kFloat32) return value;
  return dtype == DType::kFloat16 ? RoundFloat64(d, value, hwy::float16_t())
                                  : RoundFloat64(d, value, hwy::bfloat16_t());
}

// kPlain: RMSNorm with γ and nothing else, which is worth a loop without choices.
template <bool kPlain, class In, class Out>
void Apply(const Formula& f, const In* x, Out* out, int64_t n) {
  const D d;
  const V mean = hn::Set(d, f.mean);
  const V inverse = hn::Set(d, f.inverse);
  const V gamma_offset = hn::Set(d, f.gamma_offset);
  const auto step = [&](const In* x_at, const float* gamma, const float* beta, const double* gate, Out* to) HWY_ATTR {
    V y = LoadFloat64(d, x_at);
    if (kPlain) {
      y = hn::Mul(hn::Mul(y, inverse), hn::Add(LoadFloat64(d, gamma), gamma_offset));
      StoreFloat64(d, y, to);
      return;
    }
    y = RoundFloat64To(hn::Mul(hn::Sub(y, mean), inverse), f.round_to);
    const V scale = f.gamma == nullptr ? hn::Set(d, 1.0) : hn::Add(LoadFloat64(d, gamma), gamma_offset);
    y = f.beta == nullptr ? hn::Mul(y, scale) : hn::MulAdd(y, scale, LoadFloat64(d, beta));
    if (f.gate != nullptr) y = hn::Mul(RoundFloat64To(y, f.round_to), LoadFloat64(d, gate));
    StoreFloat64(d, y, to);
  };
  // Null pointers are not moved; `step` does not read them.
  const auto at = [](const auto* array, int64_t i) { return array == nullptr ? nullptr : array + i; };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(x + i, at(f.gamma, i), at(f.beta, i), at(f.gate, i), out + i);
  if (i == n) return;
  // The last, partial vector, by way of whole ones.
  In last_x[kLanes] = {};
  float last_gamma[kLanes] = {}, last_beta[kLanes] = {};
  double last_gate[kLanes] = {};
  Out last_out[kLanes];
  const size_t count = static_cast<size_t>(n - i);
  std::memcpy(last_x, x + i, count * sizeof(In));
  if (f.gamma != nullptr) std::memcpy(last_gamma, f.gamma + i, count * sizeof(float));
  if (f.beta != nullptr) std::memcpy(last_beta, f.beta + i, count * sizeof(float));
  if (f.gate != nullptr) std::memcpy(last_gate, f.gate + i, count * sizeof(double));
  step(last_x, last_gamma, last_beta, last_gate, last_out);
  std::memcpy(out + i, last_out, count * sizeof(Out));
}

// Normalises one group whose values x are ready; `gate` is for the gate that comes last, or null.
template <class In, class Out>
void NormalizeGroupOf(const NormalizeRowsArgs& args, const NormalizeGroup& group, const In* x, const double* gate) {
  const int64_t n = args.group_size;
  const bool centred = args.kind == NormKind::kLayerNorm;
  const double mean = centred ? Mean<Term::kValue>(x, n, 0.0) : 0.0;
  const double variance = centred ? Mean<Term::kCentredSquare>(x, n, mean) : Mean<Term::kSquare>(x, n, 0.0);
  const double inverse = InverseRoot(variance, args.epsilon);
  if (centred && args.mean != nullptr) args.mean[group.index] = ToFloat32WithOneNan(mean);
  if (args.inverse != nullptr) args.inverse[group.index] = ToFloat32WithOneNan(inverse);

  const Formula formula = {
      .mean = mean,
      .inverse = inverse,
      .gamma_offset = args.gamma_offset == 0 ? -0.0 : args.gamma_offset,  // adding −0 changes nothing, +0 a −0
      .gamma = args.gamma == nullptr ? nullptr : args.gamma + group.offset,
      .beta = args.beta == nullptr ? nullptr : args.beta + group.offset,
      .gate = gate,
      .round_to = RoundsBeforeGamma(args) ? args.input_dtype : DType::kFloat32,
  };
  Out* out = reinterpret_cast<Out*>(args.output) + group.first;
  const bool plain = !centred && args.gamma != nullptr && args.beta == nullptr && gate == nullptr &&
                     formula.round_to == DType::kFloat32;
  if (plain) {
    Apply<true>(formula, x, out, n);
  } else {
    Apply<false>(formula, x, out, n);
  }
}

// sum[i] = x[i] + residual[i] in float32, which rounds twice only where that cannot be told from once: float32 has more
// than twice the bits of the narrow types.
template <class T>
void AddResidual(DType dtype, const T* x, const T* residual, T* sum, int64_t n) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto value = hn::Add(LoadFloat32(df, x + i), LoadFloat32(df, residual + i));
    StoreFloat32(df, WithOneNan(df, value), sum + i);
  }
  for (; i < n; ++i) {
    const float value = static_cast<float>(Element(x + i)) + static_cast<float>(Element(residual + i));
    StoreFromFloat(dtype, ToFloat32WithOneNan(value), reinterpret_cast<std::byte*>(sum), i);
  }
}

// silu of n elements of the gate.
void OpenGate(DType dtype, const std::byte* gate, double* opened, int64_t n) {
  constexpr int64_t kChunk = 256;
  float widened[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    WidenToFloat(dtype, gate + i * static_cast<int64_t>(SizeOf(dtype)), widened, count);
    ActivateFloat64({Activation::kSilu}, widened, opened + i, count);
  }
}

template <class In, class Out>
void NormalizeAs(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t n = args.group_size;
  const bool gate_first = HasGate(args, GatePosition::kFirst);
  const bool gate_last = HasGate(args, GatePosition::kLast);
  std::vector<double> opened(gate_first || gate_last ? static_cast<size_t>(n) : 0);
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t offset = 0; offset < args.dim; offset += n) {
      const NormalizeGroup group = GroupAt(args, row, offset);
      const In* x = reinterpret_cast<const In*>(args.input) + group.first;
      if (args.residual != nullptr) {
        In* sum = reinterpret_cast<In*>(args.residual_sum) + group.first;
        AddResidual(args.input_dtype, x, reinterpret_cast<const In*>(args.residual) + group.first, sum, n);
        x = sum;
      }
      if (gate_first || gate_last) {
        const int64_t at = group.first * static_cast<int64_t>(sizeof(In));
        OpenGate(args.input_dtype, args.gate + at, opened.data(), n);
      }
      if (gate_first) {
        const D d;
        double* product = opened.data();
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
          hn::StoreU(hn::Mul(LoadFloat64(d, x + i), hn::LoadU(d, product + i)), d, product + i);
        }
        for (; i < n; ++i) product[i] *= Element(x + i);
        NormalizeGroupOf<double, Out>(args, group, product, nullptr);
      } else {
        NormalizeGroupOf<In, Out>(args, group, x, gate_last ? opened.data() : nullptr);
      }
    }
  }
}

template <class In>
void NormalizeFrom(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end) {
  switch (args.output_dtype) {
    case DType::kFloat32:
      return NormalizeAs<In, float>(args, row_begin, row_end);
    case DType::kFloat16:
      return NormalizeAs<In, hwy::float16_t>(args, row_begin, row_end);
    case DType::kBFloat16:
      return NormalizeAs<In, hwy::bfloat16_t>(args, row_begin, row_end);
  }
}

void NormalizeVectors(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end) {
  switch (args.input_dtype) {
    case DType::kFloat32:
      return NormalizeFrom<float>(args, row_begin, row_end);
    case DType::kFloat16:
      return NormalizeFrom<hwy::float16_t>(args, row_begin, row_end);
    case DType::kBFloat16:
      return NormalizeFrom<hwy::bfloat16_t>(args, row_begin, row_end);
  }
}

#endif  // LAYERD_BASELINE_TARGET

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd {

HWY_EXPORT(NormalizeVectors);

void NormalizeRows(const NormalizeRowsArgs& args, int64_t row_begin, int64_t row_end) {
  if (ActiveSimd() == Simd::kScalar) return NormalizeRowsScalar(args, row_begin, row_end);
  HWY_DYNAMIC_DISPATCH(NormalizeVectors)(args, row_begin, row_end);
}

}  // namespace layerd
#endif  // HWY_ONCE
