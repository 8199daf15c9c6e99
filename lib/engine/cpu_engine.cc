#include "lib/engine/cpu_engine.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "lib/base/errors.h"
#include "lib/base/long_work.h"
#include "lib/layers/layer.h"
#include "lib/reference/judge.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

// Takes about ten microseconds.
constexpr double kBriefWork = 1 << 18;

// Whether this thread is in a call that it computes at once.
thread_local bool computing_at_once = false;

template <typename Call>
const MemoryPlace* PlaceOf(const Call& call) {
  return call.output_memory ? &*call.output_memory : nullptr;
}

}  // namespace

CpuEngine::CpuEngine(const CpuEngineOptions& options)
    : limits_{options.max_answer_bytes, options.max_verify_flops},
      at_once_work_(options.at_once_work),
      arena_(options.threads),
      pool_(options.threads, options.queue_calls, "--queue_calls") {}

absl::StatusOr<NormalizeResult> CpuEngine::Compute(NormalizeCall& call) const {
  auto outputs =
      layerd::Normalize(arena_, call.spec, call.inputs, call.output_dtype, call.intermediates, PlaceOf(call));
  if (!outputs.ok()) return outputs.status();
  NormalizeResult result{.outputs = *std::move(outputs)};
  if (call.verify) result.report = JudgeNormalize(call.spec, call.inputs, result.outputs);
  return result;
}

absl::StatusOr<FeedForwardResult> CpuEngine::Compute(FeedForwardCall& call) const {
  if (call.packed == nullptr) GatherWeights(call.weights);  // products read them in one piece
  // Judging needs the values inside, whether or not the caller wants them.
  const bool inside = call.intermediates || call.verify;
  const auto still_wanted = [&call] { return CheckContext(call.context); };
  auto outputs = call.packed != nullptr ? layerd::FeedForward(arena_, *call.packed, call.input, call.output_dtype,
                                                              inside, still_wanted, PlaceOf(call))
                                        : layerd::FeedForward(arena_, call.spec, call.weights, call.input,
                                                              call.output_dtype, inside, still_wanted, PlaceOf(call));
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

template <typename Result, typename Call>
absl::StatusOr<Result> CpuEngine::TryToCompute(Call& call) const {
  try {
    return Compute(call);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  } catch (const std::exception& error) {
    return InternalError(error.what());
  }
}

// Checks the call and has it computed; calls `done` exactly once.
template <typename Result, typename Call, typename Done>
void CpuEngine::Submit(Call call, Done done) {
  if (!call.layer.empty()) return done(LayerNotFound("layer", call.layer));
  // Statuses are moved to whoever gets them: copies would share their text over threads, by a count inside Abseil that
  // ThreadSanitizer does not see.
  auto cost = CheckCall(call, limits_);
  if (!cost.ok()) return done(std::move(cost).status());
  if (auto status = CheckContext(call.context); !status.ok()) return done(std::move(status));
  if (cost->work < at_once_work_ && !computing_at_once) {
    if (cost->work > kBriefWork) BeforeLongWork();
    computing_at_once = true;
    done(TryToCompute<Result>(call));
    computing_at_once = false;
    return;
  }
  // Shared with the job, which the pool takes over even when it refuses it.
  auto shared_done = std::make_shared<Done>(std::move(done));
  auto status = pool_.Submit([this, call = std::move(call), shared_done]() mutable {
    auto wanted = CheckContext(call.context);
    (*shared_done)(wanted.ok() ? TryToCompute<Result>(call) : std::move(wanted));
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
