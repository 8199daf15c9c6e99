#include "lib/engine/layer_engine.h"

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/layers/layer.h"

namespace layerd {
namespace {

// Waits until the function that Done() gave has been called, and has its argument.
template <typename T>
class Waiter {
 public:
  auto Done() {
    return [shared = shared_](absl::StatusOr<T> result) {
      {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->result = std::move(result);
      }
      shared->ready.notify_one();  // not under the lock, which the waiter would wake to wait for
    };
  }

  absl::StatusOr<T> Wait() {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->ready.wait(lock, [this] { return shared_->result.has_value(); });
    return *std::move(shared_->result);
  }

 private:
  // The waiter may be gone before it has been notified.
  struct Shared {
    std::mutex mutex;
    std::condition_variable ready;
    std::optional<absl::StatusOr<T>> result;
  };
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

absl::Status CheckRoom(const MemoryPlace& place, DType dtype, int64_t bytes) {
  if (place.data == nullptr || reinterpret_cast<uintptr_t>(place.data.get()) % SizeOf(dtype) != 0) {
    return InvalidField("output_memory", "MISALIGNED",
                        absl::StrCat("expected memory aligned to ", SizeOf(dtype), " bytes"));
  }
  if (bytes <= place.bytes) return absl::OkStatus();
  return InvalidField("output_memory", "OUT_OF_RANGE",
                      absl::StrCat("expected room for an output of ", bytes, " bytes, got ", place.bytes, " bytes"));
}

// Whether an output of `bytes` may be written to `place` while `tensor` is read.
absl::Status CheckApart(std::string_view field, const Tensor& tensor, const MemoryPlace& place, int64_t bytes) {
  if (tensor.is_scattered() || bytes == 0 || tensor.data() == nullptr) return absl::OkStatus();
  const auto written = reinterpret_cast<uintptr_t>(place.data.get());
  const auto read = reinterpret_cast<uintptr_t>(tensor.data());
  if (written + static_cast<uintptr_t>(bytes) <= read || read + tensor.num_bytes() <= written) return absl::OkStatus();
  return InvalidField("output_memory", "OVERLAP",
                      absl::StrCat("expected memory that no tensor of the call has, got some of ", std::string(field)));
}
absl::Status CheckApart(std::string_view field, const std::optional<Tensor>& tensor, const MemoryPlace& place,
                        int64_t bytes) {
  return tensor ? CheckApart(field, *tensor, place, bytes) : absl::OkStatus();
}

}  // namespace

absl::Status CheckOutputMemory(const NormalizeCall& call, DType dtype, int64_t bytes) {
  if (!call.output_memory) return absl::OkStatus();
  const MemoryPlace& place = *call.output_memory;
  for (const auto& status :
       {CheckRoom(place, dtype, bytes), CheckApart("input", call.inputs.input, place, bytes),
        CheckApart("gamma", call.inputs.gamma, place, bytes), CheckApart("beta", call.inputs.beta, place, bytes),
        CheckApart("residual", call.inputs.residual, place, bytes),
        CheckApart("gate", call.inputs.gate, place, bytes)}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckOutputMemory(const FeedForwardCall& call, DType dtype, int64_t bytes) {
  if (!call.output_memory) return absl::OkStatus();
  const MemoryPlace& place = *call.output_memory;
  auto status = CheckRoom(place, dtype, bytes);
  if (status.ok()) status = CheckApart("input", call.input, place, bytes);
  for (const auto& [role, member] : kFeedForwardRoles) {
    if (!status.ok()) break;
    status = CheckApart(absl::StrCat("weights.", std::string(role)), call.weights.*member, place, bytes);
  }
  return status;
}

absl::Status CheckContext(const CallContext& context) {
  if (context.cancelled && context.cancelled->load(std::memory_order_relaxed)) return CancelledWhileWaiting();
  if (context.deadline <= absl::Now()) {
    return ExpiredWhileWaiting("the deadline passed before the call's work was done");
  }
  return absl::OkStatus();
}

absl::StatusOr<NormalizeResult> Normalize(LayerEngine& engine, NormalizeCall call) {
  Waiter<NormalizeResult> waiter;
  engine.Normalize(std::move(call), waiter.Done());
  return waiter.Wait();
}

absl::StatusOr<FeedForwardResult> FeedForward(LayerEngine& engine, FeedForwardCall call) {
  Waiter<FeedForwardResult> waiter;
  engine.FeedForward(std::move(call), waiter.Done());
  return waiter.Wait();
}

}  // namespace layerd
