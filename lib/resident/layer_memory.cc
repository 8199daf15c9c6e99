#include "lib/resident/layer_memory.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"

namespace layerd {

struct LayerMemory::State {
  const int64_t total;
  std::mutex mutex;
  std::condition_variable changed;
  int64_t used = 0;      // guarded by mutex
  uint64_t changes = 0;  // guarded by mutex

  explicit State(int64_t total_bytes) : total(total_bytes) {}

  void Change(int64_t released) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      used -= released;
      ++changes;
    }
    changed.notify_all();
  }
};

LayerMemory::Claim::Claim(std::shared_ptr<State> state, int64_t bytes) : state_(std::move(state)), bytes_(bytes) {}

LayerMemory::Claim::Claim(Claim&& other) noexcept : state_(std::move(other.state_)), bytes_(other.bytes_) {}

LayerMemory::Claim::~Claim() {
  if (state_) state_->Change(bytes_);
}

LayerMemory::LayerMemory(int64_t total_bytes) : state_(std::make_shared<State>(total_bytes)) {}

int64_t LayerMemory::total_bytes() const { return state_->total; }

int64_t LayerMemory::used_bytes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->used;
}

std::optional<LayerMemory::Claim> LayerMemory::Take(int64_t bytes) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (bytes > state_->total - state_->used) return std::nullopt;
  state_->used += bytes;
  return Claim(state_, bytes);
}

uint64_t LayerMemory::changes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->changes;
}

void LayerMemory::Changed() { state_->Change(0); }

void LayerMemory::WaitForChange(uint64_t seen, absl::Time deadline) const {
  // In steps of a day at most: longer ones may overflow inside the standard library.
  const absl::Duration left = std::clamp(deadline - absl::Now(), absl::ZeroDuration(), absl::Hours(24));
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait_for(lock, absl::ToChronoNanoseconds(left), [&] { return state_->changes != seen; });
}

}  // namespace layerd
