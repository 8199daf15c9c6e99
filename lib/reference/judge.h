// Judges results by the numerics contract: a norm by N3, a feed-forward layer stage by stage, products by N4 and
// element functions by N5, each on the operands that it really consumed (docs/numerics.md, N7).
//
// Threads: pure functions.
#ifndef LAYERD_LIB_REFERENCE_JUDGE_H_
#define LAYERD_LIB_REFERENCE_JUDGE_H_

#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"
#include "lib/reference/error_report.h"

namespace layerd {

// `outputs` of Normalize() for a call that passed its check.
ErrorReport JudgeNormalize(const NormalizeSpec& spec, const NormalizeInputs& inputs, const NormalizeOutputs& outputs);

// `outputs` of FeedForward(), with intermediates, for a call that passed its check.
ErrorReport JudgeFeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& weights, const Tensor& input,
                             const FeedForwardOutputs& outputs);

}  // namespace layerd

#endif  // LAYERD_LIB_REFERENCE_JUDGE_H_
