#include "lib/engine/admission_engine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

// A part of the budget, and the budget.
struct AnswerShare {
  std::shared_ptr<ByteBudget> budget;
  ByteBudget::Share share;
};

}  // namespace

AdmissionEngine::AdmissionEngine(const AdmissionEngineOptions& options, std::shared_ptr<ByteBudget> answers,
                                 LayerEngine& inner)
    : options_(options), inner_(inner), answers_(std::move(answers)), ledger_(options.workers) {}

AdmissionEngine::~AdmissionEngine() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return ledger_.empty(); });
}

// With mutex_ held.
absl::Status AdmissionEngine::CheckTime(absl::Time now, absl::Time deadline, double work) const {
  const absl::Duration late = ledger_.Lateness(now, deadline, work);
  if (late <= absl::ZeroDuration()) return absl::OkStatus();
  return Overloaded(
      absl::StrCat("busy: expected to take ", absl::FormatDuration(deadline - now + late),
                   " beside what was accepted before, and the deadline is in ", absl::FormatDuration(deadline - now)),
      std::clamp<int64_t>(absl::ToInt64Milliseconds(late) + 1, 10, 60000));
}

absl::StatusOr<WorkLedger::Entry> AdmissionEngine::Enter(absl::Time deadline, double work) {
  const absl::Time now = absl::Now();
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto status = CheckTime(now, deadline, work); !status.ok()) return status;
  return ledger_.Add(now, deadline, work);
}

void AdmissionEngine::Leave(WorkLedger::Entry entry, bool computed) {
  const absl::Time now = absl::Now();
  std::lock_guard<std::mutex> lock(mutex_);
  ledger_.Remove(now, entry, computed);
  if (ledger_.empty()) idle_.notify_all();
}

absl::Status AdmissionEngine::CheckAdmission(const CallContext& context) {
  if (auto status = CheckContext(context); !status.ok()) return status;
  if (auto status = inner_.CheckAdmission(context); !status.ok()) return status;
  const absl::Time now = absl::Now();
  std::lock_guard<std::mutex> lock(mutex_);
  return CheckTime(now, context.deadline, 0.0);
}

template <typename Result, typename Call, typename Done, typename Pass>
void AdmissionEngine::Submit(Call call, Done done, Pass pass) {
  if (!call.layer.empty()) return done(LayerNotFound("layer", call.layer));
  auto cost = CheckCall(call, options_.limits);
  if (!cost.ok()) return done(std::move(cost).status());
  if (auto status = CheckContext(call.context); !status.ok()) return done(std::move(status));
  auto share = answers_->TryTake(cost->answer_bytes);
  if (!share) return done(answers_->Full());
  auto entry = Enter(call.context.deadline, cost->work);
  if (!entry.ok()) return done(std::move(entry).status());
  auto held = std::make_shared<AnswerShare>(AnswerShare{answers_, *std::move(share)});
  pass(std::move(call),
       [this, entry = *entry, held = std::move(held), done = std::move(done)](absl::StatusOr<Result> result) mutable {
         if (result.ok()) result->held = std::move(held);
         held = nullptr;
         // Before the answer is given: whoever has it may end this engine, or bring the next call.
         Leave(entry, result.ok());
         done(std::move(result));
       });
}

void AdmissionEngine::Normalize(NormalizeCall call, NormalizeDone done) {
  Submit<NormalizeResult>(std::move(call), std::move(done), [this](NormalizeCall passed, NormalizeDone answer) {
    inner_.Normalize(std::move(passed), std::move(answer));
  });
}

void AdmissionEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  Submit<FeedForwardResult>(std::move(call), std::move(done), [this](FeedForwardCall passed, FeedForwardDone answer) {
    inner_.FeedForward(std::move(passed), std::move(answer));
  });
}

}  // namespace layerd
