// A catalogue in memory, for tests of what uses catalogues: layers come, are replaced and go under way, and tests count,
// hold up and fail the reading of each.
#ifndef LAYERD_TESTS_LIB_RESIDENT_MEMORY_CATALOG_H_
#define LAYERD_TESTS_LIB_RESIDENT_MEMORY_CATALOG_H_

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lib/layers/seeded.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/layer_record.h"

namespace layerd {

// A norm of seeded weights, 8 · dim bytes of them.
inline Layer SeededNormLayer(uint64_t seed, int64_t dim) {
  NormalizeLayer layer;
  layer.spec.kind = NormKind::kLayerNorm;
  layer.spec.rounding = NormRounding::kAfterGamma;
  layer.weights.gamma = SeededGamma(seed, DType::kFloat32, dim);
  layer.weights.beta = SeededBeta(seed, DType::kFloat32, dim);
  return layer;
}

inline Layer SeededSwiGluLayer(uint64_t seed, int64_t dim, int64_t hidden_dim) {
  FeedForwardLayer layer;
  layer.spec = SwiGluSpec();
  layer.weights = SeededFeedForwardWeights(seed, layer.spec, DType::kFloat32, dim, hidden_dim, false);
  return layer;
}

class MemoryRecord : public LayerRecord {
 public:
  MemoryRecord(const std::string& name, const Layer& layer) : layer_(layer) {
    info_.name = name;
    info_.outline = OutlineOf(layer);
    const auto extent = CheckLayer(layer);
    info_.status = extent.status();
    if (extent.ok()) info_.extent = *extent;
  }

  const LayerInfo& info() const override { return info_; }
  absl::StatusOr<std::unique_ptr<LayerReader>> Open() const override {
    ++reads;
    if (before_read) {
      if (auto status = before_read(); !status.ok()) return status;
    }
    if (gone) return LayerNotFound("layer", info_.name);
    return std::make_unique<Reader>(*this);
  }

  LayerInfo& mutable_info() { return info_; }  // before anyone else has it

  // Called by Open(); an error is its answer. To be set before anyone reads.
  std::function<absl::Status()> before_read;
  // Called by the reader before the bytes of `role` from `at` on are given into `out`, on the thread that reads; an error
  // is its answer. To be set before anyone reads.
  std::function<absl::Status(std::string_view role, size_t at, absl::Span<std::byte> out)> before_piece;
  // Called at the end of all reading; an error is the reader's answer.
  std::function<absl::Status()> before_finish;
  mutable std::atomic<int> reads = 0;
  std::atomic<bool> gone = false;    // Open() is NOT_FOUND
  std::atomic<bool> spoilt = false;  // each weight's first byte is another

 private:
  class Reader : public LayerReader {
   public:
    explicit Reader(const MemoryRecord& record) : record_(record) {
      for (const auto& [role, weight] : WeightsOf(record.layer_)) weights_.emplace(role, Place{weight});
    }
    absl::Status Next(std::string_view role, absl::Span<std::byte> out) override {
      auto& [weight, at] = weights_.find(role)->second;
      if (record_.before_piece) {
        if (auto status = record_.before_piece(role, at, out); !status.ok()) return status;
      }
      std::memcpy(out.data(), weight.data() + at, out.size());
      if (at == 0 && record_.spoilt) out[0] ^= std::byte{1};
      at += out.size();
      return absl::OkStatus();
    }
    absl::Status Finish() override {
      for (const auto& [role, place] : weights_) EXPECT_EQ(place.at, place.weight.num_bytes()) << role;
      return record_.before_finish ? record_.before_finish() : absl::OkStatus();
    }

   private:
    struct Place {
      Tensor weight;
      size_t at = 0;
    };
    const MemoryRecord& record_;
    std::map<std::string_view, Place> weights_;  // by role
  };

  LayerInfo info_;
  Layer layer_;
};

// Threads: any.
class MemoryCatalog : public LayerCatalog {
 public:
  // Adds the layer, or puts it in the place of the one there, which is gone then.
  std::shared_ptr<MemoryRecord> Put(const std::string& name, const Layer& layer) {
    auto record = std::make_shared<MemoryRecord>(name, layer);
    Put(record);
    return record;
  }
  void Put(const std::shared_ptr<MemoryRecord>& record) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& place = records_[record->info().name];
    if (place) place->gone = true;
    place = record;
  }
  void Remove(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = records_.find(name);
    if (found == records_.end()) return;
    found->second->gone = true;
    records_.erase(found);
  }

  absl::StatusOr<std::shared_ptr<const LayerRecord>> Find(std::string_view name) override {
    ++finds;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = records_.find(name);
    if (found == records_.end()) return LayerNotFound("name", name);
    return found->second;
  }
  std::vector<std::shared_ptr<const LayerRecord>> List() override {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<const LayerRecord>> all;
    for (const auto& [name, record] : records_) all.push_back(record);
    return all;
  }
  std::string WarningOf(std::string_view model) override { return model == "warned" ? "old files" : ""; }

  std::atomic<int> finds = 0;

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<MemoryRecord>, std::less<>> records_;  // guarded by mutex_
};

// Holds up whoever passes until it is opened.
class Gate {
 public:
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  absl::Status Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    return absl::OkStatus();
  }
  // Waits until so many have come.
  void AwaitArrival(int number = 1) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= number; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_RESIDENT_MEMORY_CATALOG_H_
