// Layers in memory: what reads and hashes them when they are asked for, and keeps as many as there is memory for.
//
// It goes by records. Of one name it keeps one version: asked for another record of that name, it drops the older one. A
// layer that a call still uses stays in memory, and counts, until the last copy of its weights is gone.
//
// Preparations go in order. One that waits for memory holds up those behind it on its thread, for a few seconds at most,
// so that a large layer is not passed over again and again for small ones.
#ifndef LAYERD_LIB_RESIDENT_PREPARED_LAYERS_H_
#define LAYERD_LIB_RESIDENT_PREPARED_LAYERS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/base/parallel.h"
#include "lib/resident/layer_memory.h"
#include "lib/resident/layer_source.h"
#include "lib/weights/layer_record.h"

namespace layerd {

// How a preparation ended, for the log.
struct PreparationEvent {
  std::string name;
  absl::Status status;
  bool ahead = false;  // begun before any call asked for the layer
  int64_t bytes = 0;   // that the layer takes when it is prepared
  absl::Duration took;
};

struct PreparedLayersOptions {
  int64_t memory_bytes = int64_t{4} << 30;
  int threads = 1;           // that prepare
  int waiting_calls = 1024;  // more are refused
  // How long a preparation waits for memory that calls use.
  absl::Duration memory_wait = absl::Seconds(5);
  // Called on the thread that prepared, after each preparation; may be null. From any number of threads at once.
  std::function<void(const PreparationEvent&)> on_event;
};

struct PreparedLayersStats {
  int64_t memory_bytes = 0;  // of prepared layers, of those being read, and of those that calls still use
  int64_t prepared = 0;
  int64_t preparations = 0;  // that succeeded, so far
  int64_t evictions = 0;     // so far
};

// Threads: any. Records must be usable (LayerInfo::status is OK). The destructor waits for preparations under way, and
// answers everyone else who waits with UNAVAILABLE.
class PreparedLayers {
 public:
  explicit PreparedLayers(const PreparedLayersOptions& options);
  ~PreparedLayers();
  PreparedLayers(const PreparedLayers&) = delete;
  PreparedLayers& operator=(const PreparedLayers&) = delete;

  // The layer of `record` where it is prepared; it counts as used now. Null where it is not.
  std::shared_ptr<const PreparedLayer> Find(const std::shared_ptr<const LayerRecord>& record);

  // Gives `done` the layer of `record`, once it is prepared: on this thread where it is already, or where it is refused
  // at once; else on the one that prepares it, for all who wait for it. To make room, what was used longest ago goes
  // first, preferably what no call uses; a `pinned` layer never does. Errors are those of LayerSource::Acquire, and
  // NOT_FOUND where Read() says so; they are not kept: the next call tries again.
  void Prepare(const std::shared_ptr<const LayerRecord>& record, bool pinned, absl::Time deadline,
               PreparedLayerDone done);

  // Prepares it though nobody waits, after all that calls wait for. Unless it is pinned, no other layer goes for it.
  void PrepareAhead(const std::shared_ptr<const LayerRecord>& record, bool pinned);

  // Drops what it has of the layer `name` in any other version than `record`; null: in any version.
  void DropOthers(std::string_view name, const std::shared_ptr<const LayerRecord>& record);
  // The names of all layers of which it knows something.
  std::vector<std::string> Names() const;

  struct Known {
    bool prepared = false;
    std::string content_hash;  // empty where the layer was never prepared; stays known when it is evicted
  };
  Known KnownOf(const std::shared_ptr<const LayerRecord>& record) const;

  PreparedLayersStats stats() const;

 private:
  struct Waiter {
    absl::Time deadline;
    PreparedLayerDone done;
  };
  // One preparation of one record, whoever waits for it.
  struct Preparation {
    std::shared_ptr<const LayerRecord> record;
    std::string content_hash;  // where it is known
    bool pinned = false;
    bool ahead = false;
    bool begun = false;           // guarded by mutex_
    std::vector<Waiter> waiters;  // guarded by mutex_
  };
  // What is kept of a name.
  struct Slot {
    std::weak_ptr<const LayerRecord> version;
    std::string content_hash;
    std::shared_ptr<Preparation> preparation;       // under way or queued, of this version
    std::shared_ptr<const PreparedLayer> prepared;  // of this version
    std::shared_ptr<const LayerRecord> record;      // keeps the version alive while it is prepared
    bool pinned = false;
    std::list<Slot*>::iterator place;  // in by_use_, where prepared
  };
  using Prepared = absl::StatusOr<std::shared_ptr<const PreparedLayer>>;
  // Layers that lose their place are freed by whoever took them out, without the lock.
  using Dropped = std::vector<std::shared_ptr<const PreparedLayer>>;

  void Work();
  void Run(const std::shared_ptr<Preparation>& preparation);
  absl::StatusOr<LayerMemory::Claim> TakeMemory(const Preparation& preparation, bool& for_all);
  static void Answer(std::vector<Waiter> waiters, Prepared prepared);
  Prepared Read(const Preparation& preparation, LayerMemory::Claim claim) const;

  // These with mutex_ held.
  Slot& SlotOf(const std::shared_ptr<const LayerRecord>& record, Dropped& dropped);
  void Unload(Slot& slot, Dropped& dropped);
  Preparation& PreparationOf(Slot& slot, const std::shared_ptr<const LayerRecord>& record);
  absl::Time WantedUntil(const Preparation& preparation) const;
  absl::StatusOr<Slot*> Victim(int64_t bytes);

  const PreparedLayersOptions options_;
  const Arena arena_;  // reads
  LayerMemory memory_;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::map<std::string, Slot, std::less<>> slots_;          // guarded by mutex_, and so is all below
  std::list<Slot*> by_use_;                                 // the prepared ones; used last: first
  std::deque<std::shared_ptr<Preparation>> asked_, ahead_;  // one that calls joined may stand in both
  int64_t waiting_ = 0;                                     // calls
  int64_t loading_bytes_ = 0;                               // claimed by preparations under way
  int64_t preparations_ = 0;
  int64_t evictions_ = 0;
  bool stopping_ = false;

  std::vector<std::thread> threads_;  // last: they use the rest
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_PREPARED_LAYERS_H_
