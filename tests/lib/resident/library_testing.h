// For the tests of the library of layers: small norms by name, and callers that do not wait.
#ifndef LAYERD_TESTS_LIB_RESIDENT_LIBRARY_TESTING_H_
#define LAYERD_TESTS_LIB_RESIDENT_LIBRARY_TESTING_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/resident/layer_library.h"
#include "lib/weights/layer_hash.h"
#include "tests/lib/resident/memory_catalog.h"

namespace layerd {

using Prepared = absl::StatusOr<std::shared_ptr<const PreparedLayer>>;

inline constexpr int64_t kDim = 32;
inline constexpr int64_t kNormBytes = 2 * 4 * kDim;  // γ and β
inline constexpr char kA[] = "models/m/layers/a", kB[] = "models/m/layers/b", kC[] = "models/m/layers/c",
                      kD[] = "models/m/layers/d";

inline Layer Norm(uint64_t seed) { return SeededNormLayer(seed, kDim); }

inline bool SameBits(const Layer& a, const Layer& b) {
  const auto of_a = WeightsOf(a), of_b = WeightsOf(b);
  if (of_a.size() != of_b.size()) return false;
  for (size_t i = 0; i < of_a.size(); ++i) {
    if (of_a[i].first != of_b[i].first || !SameBits(of_a[i].second, of_b[i].second)) return false;
  }
  return true;
}

// The layer with all its weights, in whatever form it is kept.
inline Layer LayerOf(const PreparedLayer& prepared) {
  Layer layer = prepared.layer;
  if (prepared.packed) std::get<FeedForwardLayer>(layer).weights = prepared.packed->Unpacked();
  return layer;
}

// Asks for a layer without waiting for it.
inline std::future<Prepared> AcquireLater(LayerSource& library, std::string_view name,
                                          absl::Time deadline = absl::InfiniteFuture()) {
  auto promise = std::make_shared<std::promise<Prepared>>();
  library.Acquire(name, deadline, [promise](Prepared layer) { promise->set_value(std::move(layer)); });
  return promise->get_future();
}

// The events of a library, one after the other.
class Events {
 public:
  std::function<void(const PreparationEvent&)> Listener() {
    return [this](const PreparationEvent& event) {
      std::lock_guard<std::mutex> lock(mutex_);
      events_.push_back(event);
      came_.notify_all();
    };
  }
  std::vector<PreparationEvent> Await(size_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    came_.wait(lock, [&] { return events_.size() >= number; });
    return events_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::vector<PreparationEvent> events_;
};

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_RESIDENT_LIBRARY_TESTING_H_
