#include "server/call_gate.h"

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {

absl::Status CallGate::Enter(int64_t bytes) {
  constexpr int64_t kRetryDelayMs = 100;
  std::lock_guard<std::mutex> lock(mutex_);
  if (draining_) return Draining();
  if (in_flight_ > 0 && bytes_in_flight_ + bytes > max_bytes_) {
    return Overloaded(absl::StrCat("busy: ", bytes_in_flight_, " bytes of calls are in flight (--message_memory_mib)"),
                      kRetryDelayMs);
  }
  ++in_flight_;
  bytes_in_flight_ += bytes;
  return absl::OkStatus();
}

void CallGate::Leave(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  bytes_in_flight_ -= bytes;
  if (--in_flight_ == 0) idle_.notify_all();
}

int64_t CallGate::Drain(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  draining_ = true;
  idle_.wait_until(lock, absl::ToChronoTime(deadline), [this] { return in_flight_ == 0; });
  return in_flight_;
}

}  // namespace layerd
