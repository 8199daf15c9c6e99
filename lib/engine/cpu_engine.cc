#include "lib/engine/cpu_engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/reference/judge.h"

namespace layerd {
namespace {

absl::Status CheckContext(const CallContext& context) {
  if (context.cancelled && context.cancelled->load(std::memory_order_relaxed)) return CancelledWhileWaiting();
  if (context.deadline <= absl::Now()) {
    return ExpiredWhileWaiting("the deadline passed before the call's work began");
  }
  return absl::OkStatus();
}

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

// What checks the call, as far as shapes tell: nothing is allocated or computed.
absl::Status Check(const NormalizeCall& call, const CpuEngineOptions& options) {
  const auto extent = CheckNormalize(call.spec, call.inputs);
  if (!extent.ok()) return extent.status();
  const int64_t elements = call.inputs.input.num_elements();
  double bytes = Bytes(elements, call.output_dtype.value_or(call.inputs.input.dtype()));
  if (call.inputs.residual) bytes += Bytes(elements, call.inputs.input.dtype());
  if (call.intermediates) bytes += 2 * Bytes(elements / extent->group_size, DType::kFloat32);
  if (auto status = CheckAnswer(bytes, options.max_answer_bytes); !status.ok()) return status;
  return CheckVerify(call.verify, 4.0 * static_cast<double>(elements), options.max_verify_flops);
}

absl::Status Check(const FeedForwardCall& call, const CpuEngineOptions& options) {
  const auto extent = CheckFeedForward(call.spec, call.weights, call.input);
  if (!extent.ok()) return extent.status();
  double bytes = Bytes(extent->rows * extent->out_dim, call.output_dtype.value_or(call.input.dtype()));
  if (call.intermediates) bytes += 4 * Bytes(extent->rows * extent->hidden_dim, DType::kFloat32);
  if (auto status = CheckAnswer(bytes, options.max_answer_bytes); !status.ok()) return status;
  return CheckVerify(call.verify, FeedForwardFlops(call.spec, *extent), options.max_verify_flops);
}

}  // namespace

CpuEngine::CpuEngine(const CpuEngineOptions& options) : options_(options), arena_(options.threads) {
  for (int i = 0; i < std::max(1, options.threads); ++i) {
    try {
      workers_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      break;  // a limit on processes: serve with the threads there are; workers() tells
    }
  }
}

CpuEngine::~CpuEngine() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

absl::Status CpuEngine::Enqueue(Job job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty()) return InternalError("no worker thread could be started");
    if (static_cast<int>(queue_.size()) >= options_.queue_calls) {
      const double seconds =
          mean_job_seconds_ * static_cast<double>(queue_.size()) / static_cast<double>(workers_.size());
      const int64_t delay_ms = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(seconds * 1000)), 1, 60000);
      return Overloaded(absl::StrCat("busy: ", queue_.size(), " calls wait already (--queue_calls)"), delay_ms);
    }
    queue_.push_back(std::move(job));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void CpuEngine::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    job();
    job = nullptr;  // the call's tensors are freed before the next one begins
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    lock.lock();
    mean_job_seconds_ += 0.125 * (seconds - mean_job_seconds_);
  }
}

absl::StatusOr<NormalizeResult> CpuEngine::Compute(const NormalizeCall& call) const {
  auto outputs = layerd::Normalize(arena_, call.spec, call.inputs, call.output_dtype, call.intermediates);
  if (!outputs.ok()) return outputs.status();
  NormalizeResult result{*std::move(outputs), std::nullopt};
  if (call.verify) result.report = JudgeNormalize(call.spec, call.inputs, result.outputs);
  return result;
}

absl::StatusOr<FeedForwardResult> CpuEngine::Compute(const FeedForwardCall& call) const {
  // Judging needs the values inside, whether or not the caller wants them.
  auto outputs = layerd::FeedForward(arena_, call.spec, call.weights, call.input, call.output_dtype,
                                     call.intermediates || call.verify);
  if (!outputs.ok()) return outputs.status();
  FeedForwardResult result{*std::move(outputs), std::nullopt};
  if (call.verify) result.report = JudgeFeedForward(call.spec, call.weights, call.input, result.outputs);
  if (!call.intermediates) {
    result.outputs.gate = result.outputs.up = result.outputs.hidden = result.outputs.normed = std::nullopt;
  }
  return result;
}

namespace {

// Checks the call, queues its computation, and sees to it that `done` is called exactly once. Enqueue may refuse after
// it has taken the job, so `done` is shared with it.
template <typename Result, typename Call, typename Done, typename Compute, typename Enqueue>
void Submit(Call call, Done done, const CpuEngineOptions& options, Compute compute, Enqueue enqueue) {
  if (auto status = Check(call, options); !status.ok()) return done(status);
  if (auto status = CheckContext(call.context); !status.ok()) return done(status);
  auto shared_done = std::make_shared<Done>(std::move(done));
  const auto status = enqueue([call = std::move(call), shared_done, compute] {
    const absl::Status ready = CheckContext(call.context);
    absl::StatusOr<Result> result = ready.ok() ? InternalError("not computed") : ready;
    if (ready.ok()) {
      try {
        result = compute(call);
      } catch (const std::bad_alloc&) {
        result = Overloaded("no memory for the call's work", 1000);
      } catch (const std::exception& error) {
        result = InternalError(error.what());
      }
    }
    (*shared_done)(std::move(result));
  });
  if (!status.ok()) (*shared_done)(status);
}

}  // namespace

void CpuEngine::Normalize(NormalizeCall call, NormalizeDone done) {
  Submit<NormalizeResult>(
      std::move(call), std::move(done), options_, [this](const NormalizeCall& c) { return Compute(c); },
      [this](Job job) { return Enqueue(std::move(job)); });
}

void CpuEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  Submit<FeedForwardResult>(
      std::move(call), std::move(done), options_, [this](const FeedForwardCall& c) { return Compute(c); },
      [this](Job job) { return Enqueue(std::move(job)); });
}

}  // namespace layerd
