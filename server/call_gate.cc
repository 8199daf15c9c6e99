#include "server/call_gate.h"

#include "lib/base/errors.h"

namespace layerd {

absl::Status CallGate::Enter() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (draining_) return Draining();
  ++in_flight_;
  return absl::OkStatus();
}

void CallGate::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--in_flight_ == 0) idle_.notify_all();
}

void CallGate::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  draining_ = true;
}

int64_t CallGate::Drain(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  draining_ = true;
  idle_.wait_until(lock, absl::ToChronoTime(deadline), [this] { return in_flight_ == 0; });
  return in_flight_;
}

}  // namespace layerd
