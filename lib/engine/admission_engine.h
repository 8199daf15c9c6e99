// The engine that turns away what it cannot do in time, or has no room to answer. It belongs between ResidentEngine, which
// knows the layers, and the engine whose queue it guards.
#ifndef LAYERD_LIB_ENGINE_ADMISSION_ENGINE_H_
#define LAYERD_LIB_ENGINE_ADMISSION_ENGINE_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "lib/base/byte_budget.h"
#include "lib/engine/call_check.h"
#include "lib/engine/layer_engine.h"
#include "lib/engine/work_ledger.h"

namespace layerd {

struct AdmissionEngineOptions {
  int workers = 1;    // calls that the inner engine computes at a time; at least 1
  CallLimits limits;  // the inner engine's
};

// A call is refused at once, RESOURCE_EXHAUSTED with the time to try again, where other calls are there and it, or one that
// was accepted, is expected to be late for them (lib/engine/work_ledger.h); and where the answer has no room in `answers`.
// An answer takes its part there until its result's `held` is gone.
//
// Calls are checked as CpuEngine does, before all that. Threads: any. The inner engine must outlive it; the destructor
// waits until every call is answered.
class AdmissionEngine : public LayerEngine {
 public:
  AdmissionEngine(const AdmissionEngineOptions& options, std::shared_ptr<ByteBudget> answers, LayerEngine& inner);
  ~AdmissionEngine() override;

  void Normalize(NormalizeCall call, NormalizeDone done) override;
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override;
  absl::Status CheckAdmission(const CallContext& context) override;

 private:
  template <typename Result, typename Call, typename Done, typename Pass>
  void Submit(Call call, Done done, Pass pass);
  absl::StatusOr<WorkLedger::Entry> Enter(absl::Time deadline, double work);
  void Leave(WorkLedger::Entry entry, bool computed);
  absl::Status CheckTime(absl::Time now, absl::Time deadline, double work) const;

  const AdmissionEngineOptions options_;
  LayerEngine& inner_;
  const std::shared_ptr<ByteBudget> answers_;  // results share it
  std::mutex mutex_;
  std::condition_variable idle_;
  WorkLedger ledger_;  // guarded by mutex_
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_ADMISSION_ENGINE_H_
