#include "lib/engine/cpu_engine.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "lib/base/errors.h"
#include "lib/reference/judge.h"
#include "lib/weights/layer_name.h"

namespace layerd {
CpuEngine::CpuEngine(const CpuEngineOptions& options)
    : limits_{options.max_answer_bytes, options.max_verify_flops},
      arena_(options.threads),
      pool_(options.threads, options.queue_calls, "--queue_calls") {}

absl::StatusOr<NormalizeResult> CpuEngine::Compute(const NormalizeCall& call) const {
  auto outputs = layerd::Normalize(arena_, call.spec, call.inputs, call.output_dtype, call.intermediates);
  if (!outputs.ok()) return outputs.status();
  NormalizeResult result{.outputs = *std::move(outputs)};
  if (call.verify) result.report = JudgeNormalize(call.spec, call.inputs, result.outputs);
  return result;
}

absl::StatusOr<FeedForwardResult> CpuEngine::Compute(const FeedForwardCall& call) const {
  // Judging needs the values inside, whether or not the caller wants them.
  const bool inside = call.intermediates || call.verify;
  const auto still_wanted = [&call] { return CheckContext(call.context); };
  auto outputs =
      call.packed != nullptr
          ? layerd::FeedForward(arena_, *call.packed, call.input, call.output_dtype, inside, still_wanted)
          : layerd::FeedForward(arena_, call.spec, call.weights, call.input, call.output_dtype, inside, still_wanted);
  if (!outputs.ok()) return outputs.status();
  FeedForwardResult result{.outputs = *std::move(outputs)};
  if (call.verify) {
    const FeedForwardWeights weights = call.packed != nullptr ? call.packed->Unpacked() : call.weights;
    result.report = JudgeFeedForward(call.spec, weights, call.input, result.outputs);
  }
  if (!call.intermediates) {
    result.outputs.gate = result.outputs.up = result.outputs.hidden = result.outputs.normed = std::nullopt;
  }
  return result;
}

// Checks the call and queues its computation; calls `done` exactly once.
template <typename Result, typename Call, typename Done>
void CpuEngine::Submit(Call call, Done done) {
  if (!call.layer.empty()) return done(LayerNotFound("layer", call.layer));
  // Statuses are moved to whoever gets them: copies would share their text over threads, by a count inside Abseil that
  // ThreadSanitizer does not see.
  if (auto status = CheckCall(call, limits_); !status.ok()) return done(std::move(status));
  if (auto status = CheckContext(call.context); !status.ok()) return done(std::move(status));
  // Shared with the job, which the pool takes over even when it refuses it.
  auto shared_done = std::make_shared<Done>(std::move(done));
  auto status = pool_.Submit([this, call = std::move(call), shared_done] {
    absl::Status ready = CheckContext(call.context);
    const bool wanted = ready.ok();
    absl::StatusOr<Result> result = wanted ? InternalError("not computed") : std::move(ready);
    if (wanted) {
      try {
        result = Compute(call);
      } catch (const std::bad_alloc&) {
        result = OutOfMemory();
      } catch (const std::exception& error) {
        result = InternalError(error.what());
      }
    }
    (*shared_done)(std::move(result));
  });
  if (!status.ok()) (*shared_done)(std::move(status));
}

void CpuEngine::Normalize(NormalizeCall call, NormalizeDone done) {
  Submit<NormalizeResult>(std::move(call), std::move(done));
}

void CpuEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  Submit<FeedForwardResult>(std::move(call), std::move(done));
}

}  // namespace layerd
