#include "lib/engine/cpu_engine.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/layers/layer.h"
#include "lib/reference/judge.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

// Work of less than about 100 µs.
constexpr int64_t kSmallElements = 262144;
constexpr double kSmallFlops = 2e6;

absl::Status CheckAnswer(double bytes, int64_t max_bytes) {
  if (bytes <= static_cast<double>(max_bytes)) return absl::OkStatus();
  return TooLarge("input.shape", "ANSWER_TOO_LARGE",
                  absl::StrCat("expected an answer of at most ", max_bytes, " bytes (--max_message_mib), got ",
                               static_cast<int64_t>(std::min(bytes, 9e18)), " bytes"));
}

absl::Status CheckVerify(bool verify, double flops, double max_flops) {
  if (!verify || flops <= max_flops) return absl::OkStatus();
  return TooLarge("verify", "VERIFY_TOO_LARGE",
                  absl::StrCat("expected a layer of at most ", max_flops,
                               " floating-point operations to verify (--max_verify_flops), got ", flops));
}

double Bytes(int64_t elements, DType dtype) {
  return static_cast<double>(elements) * static_cast<double>(SizeOf(dtype));
}

// What a call is, as far as shapes tell.
struct Cost {
  bool is_small;  // computed in less time than two threads take to hand it over and back
};

// Checks the call: nothing is allocated or computed.
absl::StatusOr<Cost> Check(const NormalizeCall& call, const CpuEngineOptions& options) {
  const auto extent = CheckNormalize(call.spec, call.inputs);
  if (!extent.ok()) return extent.status();
  const int64_t elements = call.inputs.input.num_elements();
  double bytes = Bytes(elements, call.output_dtype.value_or(call.inputs.input.dtype()));
  if (call.inputs.residual) bytes += Bytes(elements, call.inputs.input.dtype());
  if (call.intermediates) bytes += 2 * Bytes(elements / extent->group_size, DType::kFloat32);
  if (auto status = CheckAnswer(bytes, options.max_answer_bytes); !status.ok()) return status;
  const double flops = 4.0 * static_cast<double>(elements);
  if (auto status = CheckVerify(call.verify, flops, options.max_verify_flops); !status.ok()) return status;
  return Cost{!call.verify && elements <= kSmallElements};
}

absl::StatusOr<Cost> Check(const FeedForwardCall& call, const CpuEngineOptions& options) {
  const auto extent = CheckFeedForward(call.spec, call.weights, call.input);
  if (!extent.ok()) return extent.status();
  double bytes = Bytes(extent->rows * extent->out_dim, call.output_dtype.value_or(call.input.dtype()));
  if (call.intermediates) bytes += 4 * Bytes(extent->rows * extent->hidden_dim, DType::kFloat32);
  if (auto status = CheckAnswer(bytes, options.max_answer_bytes); !status.ok()) return status;
  const double flops = FeedForwardFlops(call.spec, *extent);
  if (auto status = CheckVerify(call.verify, flops, options.max_verify_flops); !status.ok()) return status;
  return Cost{!call.verify && flops <= kSmallFlops};
}

// Products read weights in one piece. What they came in is given back.
void Gather(FeedForwardWeights& weights) {
  for (const auto& [role, member] : kFeedForwardRoles) {
    if (std::optional<Tensor>& weight = weights.*member) weight = weight->Together();
  }
}

}  // namespace

CpuEngine::CpuEngine(const CpuEngineOptions& options)
    : options_(options), arena_(options.threads), pool_(options.threads, options.queue_calls, "--queue_calls") {}

absl::StatusOr<NormalizeResult> CpuEngine::Compute(NormalizeCall& call) const {
  auto outputs = layerd::Normalize(arena_, call.spec, call.inputs, call.output_dtype, call.intermediates);
  if (!outputs.ok()) return outputs.status();
  NormalizeResult result{.outputs = *std::move(outputs)};
  if (call.verify) result.report = JudgeNormalize(call.spec, call.inputs, result.outputs);
  return result;
}

absl::StatusOr<FeedForwardResult> CpuEngine::Compute(FeedForwardCall& call) const {
  if (call.packed == nullptr) Gather(call.weights);
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

// Computes the call, if it is still wanted.
template <typename Result, typename Call>
absl::StatusOr<Result> CpuEngine::Answer(Call& call) const {
  if (auto status = CheckContext(call.context); !status.ok()) return status;
  try {
    return Compute(call);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  } catch (const std::exception& error) {
    return InternalError(error.what());
  }
}

// Checks the call, and computes it or queues its computation; calls `done` exactly once.
template <typename Result, typename Call, typename Done>
void CpuEngine::Submit(Call call, Done done) {
  if (!call.layer.empty()) return done(LayerNotFound("layer", call.layer));
  // Statuses are moved to whoever gets them: copies would share their text over threads, by a count inside Abseil that
  // ThreadSanitizer does not see.
  auto cost = Check(call, options_);
  if (!cost.ok()) return done(std::move(cost).status());
  if (cost->is_small && options_.small_on_caller) return done(Answer<Result>(call));
  if (auto status = CheckContext(call.context); !status.ok()) return done(std::move(status));
  // Shared with the job, which the pool takes over even when it refuses it.
  auto shared_done = std::make_shared<Done>(std::move(done));
  auto status =
      pool_.Submit([this, call = std::move(call), shared_done]() mutable { (*shared_done)(Answer<Result>(call)); });
  if (!status.ok()) (*shared_done)(std::move(status));
}

void CpuEngine::Normalize(NormalizeCall call, NormalizeDone done) {
  Submit<NormalizeResult>(std::move(call), std::move(done));
}

void CpuEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  Submit<FeedForwardResult>(std::move(call), std::move(done));
}

}  // namespace layerd
