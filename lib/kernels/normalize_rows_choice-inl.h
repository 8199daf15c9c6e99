// Which form of normalize_rows_fast-inl.h is right for which arguments.
// Included once per SIMD target, by normalize_rows.cc only.

#include <type_traits>

#include "hwy/highway.h"
#include "lib/kernels/normalize_rows_fast-inl.h"
#include "lib/kernels/normalize_rows_internal.h"
#include "lib/kernels/normalize_rows_pair-inl.h"
#include "lib/kernels/normalize_rows_weights-inl.h"

#if defined(LAYERD_LIB_KERNELS_NORMALIZE_ROWS_CHOICE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_CHOICE_INL_H_
#undef LAYERD_LIB_KERNELS_NORMALIZE_ROWS_CHOICE_INL_H_
#else
#define LAYERD_LIB_KERNELS_NORMALIZE_ROWS_CHOICE_INL_H_
#endif

#if !LAYERD_BASELINE_TARGET
HWY_BEFORE_NAMESPACE();
namespace layerd {
namespace HWY_NAMESPACE {

// Calls action.Run<Form>(weights) with the form that is right for `args`; false where there is none. An Action is a
// class and not a lambda, which would lose the attributes of its target.
template <class Action>
class Choice {
 public:
  Choice(const NormalizeRowsArgs& args, Weights& weights, const Action& action)
      : args_(args), weights_(weights), action_(action) {}

  bool Run() const {
    if (args_.gate_position != GatePosition::kNone) return false;
    switch (args_.output_dtype) {
      case DType::kFloat32:
        return RunTo<float>();
      case DType::kFloat16:
        return RunTo<hwy::float16_t>();
      case DType::kBFloat16:
        return RunTo<hwy::bfloat16_t>();
      case DType::kInt8:
        break;
    }
    return false;
  }

 private:
  template <class Form>
  bool RunForm() const {
    action_.template Run<Form>(weights_);
    return true;
  }

  template <class Out>
  bool RunTo() const {
    const bool estimates = args_.kind == NormKind::kRmsNorm && args_.beta == nullptr && weights_.are_floats();
    if (RoundsBeforeGamma(args_)) {
      if (!estimates) return false;
      return args_.input_dtype == DType::kFloat16 ? RunRounded<hwy::float16_t, Out>()
                                                  : RunRounded<hwy::bfloat16_t, Out>();
    }
    if (estimates && RunEstimate<Out>()) return true;
    if (!weights_.MakeWide()) return false;
    return args_.kind == NormKind::kLayerNorm ? RunForm<WideForm<Out, true>>() : RunForm<WideForm<Out, false>>();
  }

  template <class Out>
  bool RunEstimate() const {
    if constexpr (!std::is_same_v<Out, float>) {
      return weights_.are_moderate() && RunForm<NarrowForm<Out>>();
    } else {
#if HWY_TARGET <= HWY_AVX3
      return RunForm<PairForm>();
#else
      return false;
#endif
    }
  }

  template <class T16, class Out>
  bool RunRounded() const {
    if constexpr (std::is_same_v<Out, float>) {
      return RunForm<RoundedForm<T16, float, false>>();
    } else if constexpr (std::is_same_v<Out, T16>) {
      return weights_.are_short() ? RunForm<RoundedForm<T16, T16, true>>() : RunForm<RoundedForm<T16, T16, false>>();
    } else {
      return false;
    }
  }

  const NormalizeRowsArgs& args_;
  Weights& weights_;
  const Action& action_;
};

template <class Action>
bool RunWithForm(const NormalizeRowsArgs& args, Weights& weights, const Action& action) {
  return Choice<Action>(args, weights, action).Run();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace layerd
HWY_AFTER_NAMESPACE();
#endif  // !LAYERD_BASELINE_TARGET

#endif  // LAYERD_LIB_KERNELS_NORMALIZE_ROWS_CHOICE_INL_H_
