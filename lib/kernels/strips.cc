#include "lib/kernels/strips.h"

#include <algorithm>
#include <utility>

#include "lib/kernels/highway_targets.h"
#include "lib/kernels/simd.h"

// The order of these matters:
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lib/kernels/strips.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lib/kernels/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

#if LAYERD_BASELINE_TARGET || !HWY_ARCH_X86

void Sum(const StripSums& sums) { SumStripsScalar(sums); }
void Finish(float* y, int64_t rows, int64_t width, int64_t stride, const float* bias) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t n = 0; n < width; ++n) {
      float& at = y[row * stride + n];
      const float value = at + 0.0f;
      at = OneNan(bias == nullptr ? value : value + bias[n]);
    }
  }
}

#else

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr int64_t kLanes = HWY_TARGET == HWY_AVX2 ? 8 : 16;
// A kernel sums so many rows by so many vectors of one strip or of two. 8 sums are needed to cover the latency of an FMA
// (4 cycles, two a cycle), and all must stay in registers, with the weights and a value of x: 16 with AVX2, 32 with
// AVX-512.
struct Shape {
  int strips;
  int vectors;
  int least_rows, most_rows;
  int least_kept;  // rows from which on it may keep the weights that it widened, for other groups
};
#if HWY_TARGET == HWY_AVX2
constexpr Shape kSmallShape = {1, 2, 1, 6, 1};    // 12 sums
constexpr int kMostRows = kSmallShape.most_rows;  // longer groups in parts
#else
constexpr Shape kPairShape = {2, 2, 1, 6, 7};     // 24 sums
constexpr Shape kStripShape = {1, 2, 1, 14, 8};   // 28 sums; of several groups none has fewer rows
constexpr Shape kTallShape = {1, 1, 15, 16, 17};  // 16 sums
constexpr int kMostRows = kTallShape.most_rows;
static_assert(kMostRows == kFewRows && kStripShape.most_rows >= kGroupRows);
#endif

// ---- the weights of a strip -----------------------------------------------------------------------------------------

// The first weight of input k of a strip; of int8, k is the first of a block, and its scales lie before it.
template <typename T>
HWY_INLINE const T* WeightsAt(const std::byte* strip, int64_t k) {
  return reinterpret_cast<const T*>(strip) + k * kPanelOutputs;
}
template <>
HWY_INLINE const int8_t* WeightsAt(const std::byte* strip, int64_t k) {
  return reinterpret_cast<const int8_t*>(strip + k / kScaleBlock * kInt8BlockBytes + kInt8ScaleBytes);
}

// What widens one vector of weights of a block.
template <typename T>
struct Widening {
  // For the outputs from n on of the block whose first weight is at `block`.
  HWY_INLINE void Begin(const T* /*block*/, int64_t /*n*/) {}
  HWY_INLINE V Load(const T* from) const { return LoadFloat32(D(), from); }
};

// scale · q as (kBase + kUnit · (q + 128)) · (scale / kUnit) + shift by one FMA, in which nothing is rounded: the scale
// has 11 bits, q 8, and shift = −(kBase / kUnit + 128) · scale at most 20. Only where the scale is infinite it would be NaN.
template <>
struct Widening<int8_t> {
  HWY_INLINE void Begin(const int8_t* block, int64_t n) {
    const D d;
    const V s = LoadFloat32(d, reinterpret_cast<const hwy::float16_t*>(block - kInt8ScaleBytes) + n);
    scale = hn::Mul(s, hn::Set(d, 1 / kUnit));
    shift = hn::Mul(s, hn::Set(d, -(kBase / kUnit + 128)));
  }
#if HWY_TARGET <= HWY_AVX3
  // The 16 bytes go into the mantissas of 2²³, a byte up, in one instruction.
  static constexpr float kBase = 0x1p23f, kUnit = 256;
  HWY_INLINE V Load(const int8_t* from) const {
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    // Byte 1 of element i is byte i; of every 128 bits there is a copy.
    const __m512i order = _mm512_set_epi32(15 << 8, 14 << 8, 13 << 8, 12 << 8, 11 << 8, 10 << 8, 9 << 8, 8 << 8, 7 << 8,
                                           6 << 8, 5 << 8, 4 << 8, 3 << 8, 2 << 8, 1 << 8, 0);
    const __m512i base = _mm512_castps_si512(_mm512_set1_ps(kBase));
    const __m512i kept = _mm512_mask_shuffle_epi8(base, 0x2222222222222222, bytes, order);
    return hn::MulAdd(V{_mm512_castsi512_ps(kept)}, scale, shift);
  }
#else
  static constexpr float kBase = 0, kUnit = 1;
  HWY_INLINE V Load(const int8_t* from) const {
    const hn::Rebind<uint8_t, D> du8;
    const hn::Rebind<int32_t, D> di32;
    const auto kept = hn::PromoteTo(di32, hn::LoadU(du8, reinterpret_cast<const uint8_t*>(from)));
    return hn::MulAdd(hn::ConvertTo(D(), kept), scale, shift);
  }
#endif
  V scale, shift;
};

bool HasInfiniteScale(const std::byte* strip, int64_t depth) {
  const hn::CappedTag<uint16_t, 16> d;
  for (int64_t k = 0; k < depth; k += kScaleBlock) {
    const auto* scales = reinterpret_cast<const uint16_t*>(strip + k / kScaleBlock * kInt8BlockBytes);
    for (int64_t n = 0; n < kPanelOutputs; n += 16) {
      const auto magnitude = hn::And(hn::LoadU(d, scales + n), hn::Set(d, uint16_t{0x7FFF}));
      if (!hn::AllFalse(d, hn::Eq(magnitude, hn::Set(d, uint16_t{0x7C00})))) return true;
    }
  }
  return false;
}

// Widens strips `begin` to `end` − 1 by the scalar twin if one of them is beyond Widening; false if none is.
template <typename T>
bool WidenByTwin(const StripSums& s, int begin, int end) {
  if constexpr (std::is_same_v<T, int8_t>) {
    const int64_t depth = s.x->Depth(s.k0);
    bool infinite = false;
    for (int i = begin; i < end; ++i) infinite = infinite || HasInfiniteScale(s.strips[i], depth);
    for (int i = begin; infinite && i < end; ++i) {
      WidenStripScalar(s.dtype, s.strips[i], depth, s.widened + i * kStripFloats);
    }
    return infinite;
  }
  return false;
}

// ---- the sums -------------------------------------------------------------------------------------------------------

// What is read next, fetched meanwhile: some lines of each strip for every 4 inputs. Evenly: where all was fetched in a
// part of the time, the memory would rest in the other.
struct Fetch {
  const std::byte* next[2];
  int64_t rate;  // lines for every 4 inputs, in units of 2⁻¹⁶
  int64_t due;   // what is left over of them
};

constexpr int64_t kOneLine = int64_t{1} << 16;

struct GroupSums {
  const std::byte* strips[2];
  int64_t n;  // first output of the strips
  int64_t depth;
  const float* x;  // [depth][stride]
  int64_t stride;  // rows of the group
  float* y[2];     // [rows of the group][32]
  bool begin;
  float* widened[2];
  Fetch* fetch;
};

#if HWY_TARGET <= HWY_AVX3
// sum + x · w, x being the FMA's operand in memory. Compilers load what is used twice into a register.
HWY_INLINE V AddProduct(const float& x, V w, V sum) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum.raw) : "v"(w.raw), "m"(x));
  return sum;
}
#endif

// R rows by the vectors of the shape, from output n on. With kKeep the widened weights are stored too.
template <typename T, int R, Shape kShape, bool kKeep>
HWY_INLINE void SumGroup(const GroupSums& g, const float* HWY_RESTRICT x, int64_t stride, float* const (&y_of)[2]) {
  constexpr int kStrips = kShape.strips, kVectors = kShape.vectors, kSums = kStrips * kVectors;
  const D d;
  V sum[R][kSums];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kSums; ++v) sum[r][v] = hn::Zero(d);
  }
  Fetch fetch = *g.fetch;
  for (int64_t k0 = 0; k0 < g.depth; k0 += kScaleBlock) {
    const int64_t length = std::min(kScaleBlock, g.depth - k0);
    const T* rows[kStrips];
    Widening<T> widening[kSums];
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) {
      rows[s] = WeightsAt<T>(g.strips[s], k0) + g.n;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        widening[s * kVectors + v].Begin(WeightsAt<T>(g.strips[s], k0), g.n + v * kLanes);
      }
    }
    const auto step = [&](int64_t k) HWY_ATTR {
      V w[kSums];
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const int i = s * kVectors + v;
          w[i] = widening[i].Load(rows[s] + k * kPanelOutputs + v * kLanes);
          if (kKeep) hn::Store(w[i], d, g.widened[s] + (k0 + k) * kPanelOutputs + g.n + v * kLanes);
        }
      }
      const float* const x_at = x + (k0 + k) * stride;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#if HWY_TARGET <= HWY_AVX3
        if constexpr (kStrips == 1 && R > 6) {
#pragma GCC unroll 2
          for (int v = 0; v < kSums; ++v) sum[r][v] = AddProduct(x_at[r], w[v], sum[r][v]);
          continue;
        }
#endif
        const V xr = hn::Set(d, x_at[r]);
#pragma GCC unroll 4
        for (int v = 0; v < kSums; ++v) sum[r][v] = hn::MulAdd(xr, w[v], sum[r][v]);
      }
    };
    int64_t k = 0;
    for (; k + 4 <= length; k += 4) {
      fetch.due += fetch.rate;
      for (; fetch.due >= kOneLine; fetch.due -= kOneLine) {
#pragma GCC unroll 2
        for (int s = 0; s < kStrips; ++s) {
          __builtin_prefetch(fetch.next[s], 0, 2);  // the second-level cache: the first is full of what is used now
          fetch.next[s] += 64;
        }
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) step(k + i);
    }
    for (; k < length; ++k) step(k);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) {
      float* y = y_of[i / kVectors] + r * kPanelOutputs + g.n + i % kVectors * kLanes;
      hn::Store(hn::Add(g.begin ? hn::Zero(d) : hn::Load(d, y), sum[r][i]), d, y);
    }
  }
  *g.fetch = fetch;
}

// `count` groups, one after the other; R rows of each.
template <typename T, int R, Shape kShape, bool kKeep>
HWY_NOINLINE void SumRun(const GroupSums& g, int64_t count) {
  const int64_t stride = kMostRows < kFewRows ? g.stride : R;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = i * stride;
    float* const y[2] = {g.y[0] + row * kPanelOutputs, kShape.strips == 2 ? g.y[1] + row * kPanelOutputs : nullptr};
    SumGroup<T, R, kShape, kKeep>(g, g.x + row * g.depth, stride, y);
  }
}

using SumRunFunction = void (*)(const GroupSums&, int64_t);

template <typename T, Shape kShape, bool kKeep, int kLeast, int... kRowsLessLeast>
HWY_INLINE SumRunFunction PickSumRun(int64_t rows, std::integer_sequence<int, kRowsLessLeast...>) {
  static constexpr SumRunFunction kTable[] = {SumRun<T, kRowsLessLeast + kLeast, kShape, kKeep>...};
  return kTable[std::max<int64_t>(rows, kLeast) - kLeast];
}

template <typename T, Shape kShape>
void SumRunOf(int64_t rows, const GroupSums& g, int64_t count) {
  constexpr int kSizes = kShape.most_rows - kShape.least_rows + 1;
  PickSumRun<T, kShape, false, kShape.least_rows>(rows, std::make_integer_sequence<int, kSizes>())(g, count);
}

// The same for one group, which keeps the widened weights; false if it does not.
template <typename T, Shape kShape>
bool SumAndKeep(int64_t rows, const GroupSums& g) {
  constexpr int kSizes = kShape.most_rows - kShape.least_kept + 1;
  if constexpr (kSizes > 0) {
    if (rows >= kShape.least_kept) {
      PickSumRun<T, kShape, true, kShape.least_kept>(rows, std::make_integer_sequence<int, kSizes>())(g, 1);
      return true;
    }
  }
  SumRunOf<T, kShape>(rows, g, 1);
  return false;
}

// The groups one after the other, for the strips of the shape. Narrow weights are widened by the first rows for all
// others.
template <typename T, Shape kShape>
void SumGroups(const StripSums& s, int first_strip) {
  const RowBlocks& x = *s.x;
  const RowGroups& groups = x.groups();
  const int64_t row_begin = groups.First(s.group_begin);
  GroupSums g = {.depth = x.Depth(s.k0), .begin = s.k0 == 0};
  // What is fetched is spread evenly over all that is computed.
  constexpr int64_t kOutputs = kShape.vectors * kLanes;
  const int64_t runs = (s.group_end - s.group_begin) * RowGroups(groups.Size(s.group_begin), kMostRows).count;
  const int64_t steps = runs * (kPanelOutputs / kOutputs) * std::max<int64_t>(1, g.depth / 4);
  Fetch fetch = {};
  if (s.next[first_strip] != nullptr) {
    for (int i = 0; i < kShape.strips; ++i) {  // where the last pair lacks a second strip, the first is asked for twice
      fetch.next[i] = s.next[first_strip + i] != nullptr ? s.next[first_strip + i] : s.next[first_strip];
    }
    fetch.rate = (s.next_bytes / 64 * kOneLine + steps - 1) / steps;
  }
  g.fetch = &fetch;
  const bool all_widened = std::is_same_v<T, float> || WidenByTwin<T>(s, first_strip, first_strip + kShape.strips);
  for (g.n = 0; g.n < kPanelOutputs; g.n += kOutputs) {
    bool widened = all_widened;
    for (int64_t group = s.group_begin, count = 0; group < s.group_end; group += count) {
      // As many groups of one size as there are; where weights have to be widened, the first one alone.
      const int64_t same_end = group < groups.larger ? std::min(groups.larger, s.group_end) : s.group_end;
      count = widened ? same_end - group : 1;
      g.stride = groups.Size(group);
      const RowGroups parts(g.stride, kMostRows);
      for (int64_t part = 0; part < parts.count; ++part) {
        const int64_t rows = parts.Size(part);
        g.x = x.At(s.k0, group) + parts.First(part);
        for (int i = 0; i < kShape.strips; ++i) {
          const int strip = first_strip + i;
          g.widened[i] = s.widened + strip * kStripFloats;
          g.strips[i] =
              widened && !std::is_same_v<T, float> ? reinterpret_cast<const std::byte*>(g.widened[i]) : s.strips[strip];
          g.y[i] = s.y[strip] + (groups.First(group) - row_begin + parts.First(part)) * kPanelOutputs;
        }
        if (widened) {
          SumRunOf<float, kShape>(rows, g, count);
        } else if (part + 1 == parts.count && group + 1 == s.group_end) {
          SumRunOf<T, kShape>(rows, g, count);
        } else {
          widened = SumAndKeep<T, kShape>(rows, g);
        }
      }
    }
  }
}

template <typename T, Shape kShape>
void SumStripByStrip(const StripSums& s) {
  for (int strip = 0; strip < 2 && s.strips[strip] != nullptr; ++strip) SumGroups<T, kShape>(s, strip);
}

template <typename T>
void SumAs(const StripSums& s) {
#if HWY_TARGET == HWY_AVX2
  SumStripByStrip<T, kSmallShape>(s);
#else
  const int64_t rows = s.x->groups().Size(s.group_begin);
  if (rows > kStripShape.most_rows) return SumStripByStrip<T, kTallShape>(s);
  if (rows > kPairShape.most_rows || s.strips[1] == nullptr) return SumStripByStrip<T, kStripShape>(s);
  SumGroups<T, kPairShape>(s, 0);
#endif
}

void Sum(const StripSums& s) {
  switch (s.dtype) {
    case DType::kFloat32:
      return SumAs<float>(s);
    case DType::kFloat16:
      return SumAs<hwy::float16_t>(s);
    case DType::kBFloat16:
      return SumAs<hwy::bfloat16_t>(s);
    case DType::kInt8:
      return SumAs<int8_t>(s);
  }
}

// ---- after the sums -------------------------------------------------------------------------------------------------

void Finish(float* y, int64_t rows, int64_t width, int64_t stride, const float* bias) {
  const D d;
  const int64_t whole = width / kLanes * kLanes;
  for (int64_t row = 0; row < rows; ++row) {
    float* at = y + row * stride;
    for (int64_t n = 0; n < whole; n += kLanes) {
      V value = hn::Add(hn::LoadU(d, at + n), hn::Zero(d));
      if (bias != nullptr) value = hn::Add(value, hn::LoadU(d, bias + n));
      hn::StoreU(WithOneNan(d, value), d, at + n);
    }
    for (int64_t n = whole; n < width; ++n) {
      const float value = at[n] + 0.0f;
      at[n] = OneNan(bias == nullptr ? value : value + bias[n]);
    }
  }
}

#endif  // LAYERD_BASELINE_TARGET || !HWY_ARCH_X86

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerd {
namespace {

HWY_EXPORT(Sum);
HWY_EXPORT(Finish);

}  // namespace

// ActiveSimd() before each dispatch, as simd.cc says.

void SumStrips(const StripSums& sums) {
  if (ActiveSimd() == Simd::kScalar) return SumStripsScalar(sums);
  HWY_DYNAMIC_DISPATCH(Sum)(sums);
}

void FinishSums(float* y, int64_t rows, int64_t width, int64_t stride, const float* bias) {
  ActiveSimd();
  HWY_DYNAMIC_DISPATCH(Finish)(y, rows, width, stride, bias);
}

}  // namespace layerd
#endif  // HWY_ONCE
