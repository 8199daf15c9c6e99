// Block by block, with any options, for groups of any length: from one pass over a group to the next, nothing is kept but
// what was made of the last block.
// Included once per SIMD target, by normalize_rows.cc only.

#include <algorithm>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "lib/kernels/normalize_rows_choice-inl.h"
#include "lib/kernels/normalize_rows_exact-inl.h"
#include "lib/kernels/normalize_rows_fast-inl.h"
#include "lib/kernels/normalize_rows_internal.h"
#include "lib/kernels/normalize_rows_source-inl.h"
#include "lib/kernels/normalize_rows_weights-inl.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_BLOCKS_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_BLOCKS_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_BLOCKS_INL_H_
#endif

#if !LAYERD_BASELINE_TARGET
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

// Writes n elements from in.x on, which lie in one block.
template <class Form>
HWY_NOINLINE void WriteBy(const NormalizeRowsArgs& args, const Weights& weights, const GroupInput& in, int64_t n) {
  Form form;
  form.Begin(args, weights, in);
  typename Form::Doubt doubt;
  doubt.Clear();
  Form::ClearDoubts();
  int64_t i = 0;
  if (Form::Takes(in.statistics)) {
    i = args.stream_output ? std::min(n, ElementsToAlignment(form.out())) : 0;
    const int64_t first = i;
    for (; i + kWideLanes <= n; i += kWideLanes)
      form.Put(form.Compute(in.x + i, form.ColumnsAt(i), doubt), i, args.stream_output);
    if (first > 0) form.WriteExactly(0, first);
    if (!Form::IsSure(doubt)) i = 0;
  }
  if (i < n) form.WriteExactly(i, n - i);
  if (args.stream_output) hwy::FlushStream();
}

class Blocks {
 public:
  // Floats of memory that are needed.
  static int64_t Floats() { return 3 * kSumBlock + Weights::Floats(kSumBlock); }

  // `exactly`: without the forms.
  Blocks(const NormalizeRowsArgs& args, float* memory, bool exactly = false)
      : args_(args),
        exactly_(exactly),
        source_(args),
        gated_(HasGate(args, GatePosition::kFirst) || HasGate(args, GatePosition::kLast)),
        opened_(reinterpret_cast<double*>(memory)),
        made_(memory + 2 * kSumBlock),
        weights_memory_(memory + 3 * kSumBlock) {}

  // The sums of one block's terms. The first term makes x; others find the residual added.
  TermSums Sum(int64_t group, int64_t block, const Terms& terms) {
    Read(group, block, terms.scale, terms.term == SumTerm::kCentred);
    return HasGate(args_, GatePosition::kFirst) ? SumOf(opened_, terms) : SumOf(x_, terms);
  }

  // Writes the output of one block; its sums were taken before.
  void Write(int64_t group, int64_t block, const GroupStatistics& statistics) {
    Read(group, block, statistics.scale, true);
    NormalizeGroup at = GroupAt(args_, group);
    at.offset += block * kSumBlock;
    at.first += block * kSumBlock;
    const GroupInput in = {x_, at, statistics};
    if (!exactly_ && RunByForm(in)) return;
    switch (args_.output_dtype) {
      case DType::kFloat32:
        return WriteExactly<float>(in);
      case DType::kFloat16:
        return WriteExactly<hwy::float16_t>(in);
      case DType::kBFloat16:
        return WriteExactly<hwy::bfloat16_t>(in);
      case DType::kInt8:
        return;
    }
  }

 private:
  struct ByForm {
    const NormalizeRowsArgs& args;
    const GroupInput& in;
    int64_t n;
    template <class Form>
    void Run(const Weights& weights) const {
      WriteBy<Form>(args, weights, in, n);
    }
  };

  bool RunByForm(const GroupInput& in) const {
    Weights weights(args_, in.group.offset, in.group.offset + count_, weights_memory_);
    return RunWithForm(args_, weights, ByForm{args_, in, count_});
  }

  // Makes x and opens the gate of one block. `added`: the residual was added before.
  void Read(int64_t group, int64_t block, double scale, bool added) {
    if (group == group_ && block == block_ && scale == scale_) return;
    group_ = group;
    block_ = block;
    scale_ = scale;
    first_ = GroupAt(args_, group).first + block * kSumBlock;
    count_ = std::min(kSumBlock, args_.group_size - block * kSumBlock);
    source_.Make(first_, count_, made_, added);
    x_ = source_.At(first_, made_);
    if (!gated_) return;
    OpenGate(args_.input_dtype, args_.gate + first_ * source_.element_bytes(), opened_, count_);
    if (args_.gate_position == GatePosition::kFirst) MultiplyBy(x_, scale, opened_, count_);
  }

  template <class X>
  TermSums SumOf(const X* x, const Terms& terms) const {
    switch (terms.term) {
      case SumTerm::kSquare:
        return SumBlock<SumTerm::kSquare>(x, count_, 0.0);
      case SumTerm::kValueAndSquare:
        return SumBlock<SumTerm::kValueAndSquare>(x, count_, 0.0);
      case SumTerm::kCentred:
        return SumBlock<SumTerm::kCentred>(x, count_, terms.center);
    }
    return {};
  }

  template <class Out>
  void WriteExactly(const GroupInput& in) const {
    const Formula formula = FormulaOf(args_, in.group, in.statistics);
    Out* const out = reinterpret_cast<Out*>(args_.output) + first_;
    if (HasGate(args_, GatePosition::kFirst)) {
      ApplyFormula<double, Out>(formula, opened_, nullptr, out, count_);
    } else {
      ApplyFormula<float, Out>(formula, x_, gated_ ? opened_ : nullptr, out, count_);
    }
  }

  const NormalizeRowsArgs& args_;
  const bool exactly_;
  FloatSource source_;
  bool gated_;
  double* opened_;  // silu of the gate; with gate first, times x · scale
  float* made_;
  float* weights_memory_;
  // What was read last.
  int64_t group_ = -1, block_ = -1;
  double scale_ = 1;
  int64_t first_ = 0, count_ = 0;
  const float* x_ = nullptr;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // !LAYERD_BASELINE_TARGET

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_BLOCKS_INL_H_
