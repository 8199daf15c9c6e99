#include "lib/resident/prepared_layers.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/resident/layer_preparation.h"

namespace layerd {
namespace {

// A feed-forward layer has three large weights, and each is read, hashed and packed by one thread.
constexpr int kReadingThreads = 3;
constexpr int64_t kRetryDelayMs = 1000;

absl::Status Expired() { return ExpiredWhileWaiting("the deadline passed before the layer was prepared"); }

}  // namespace

PreparedLayers::PreparedLayers(const PreparedLayersOptions& options)
    : options_(options), arena_(std::min(kReadingThreads, AvailableCpus())), memory_(options.memory_bytes) {
  for (int i = 0; i < std::max(1, options.threads); ++i) {
    try {
      threads_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      break;  // a limit on processes: go on with the threads there are
    }
  }
}

PreparedLayers::~PreparedLayers() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  memory_.Changed();
  for (std::thread& thread : threads_) thread.join();
  for (const auto& preparation : asked_) {
    for (Waiter& waiter : preparation->waiters) waiter.done(Draining());
    preparation->waiters.clear();
  }
}

std::shared_ptr<const PreparedLayer> PreparedLayers::Find(const std::shared_ptr<const LayerRecord>& record) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = slots_.find(record->info().name);
  if (found == slots_.end() || !found->second.prepared || found->second.record != record) return nullptr;
  by_use_.splice(by_use_.begin(), by_use_, found->second.place);
  return found->second.prepared;
}

void PreparedLayers::Prepare(const std::shared_ptr<const LayerRecord>& record, bool pinned, absl::Time deadline,
                             PreparedLayerDone done) {
  Prepared answer;
  Dropped dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = SlotOf(record, dropped);
    slot.pinned = pinned;
    if (slot.prepared) {
      by_use_.splice(by_use_.begin(), by_use_, slot.place);
      answer = slot.prepared;
    } else if (stopping_) {
      answer = Draining();
    } else if (threads_.empty()) {
      answer = InternalError("no thread that prepares layers could be started");
    } else if (deadline <= absl::Now()) {
      answer = Expired();
    } else if (waiting_ >= options_.waiting_calls) {
      answer =
          Overloaded(absl::StrCat("busy: ", waiting_, " calls wait already for layers to be prepared"), kRetryDelayMs);
    } else {
      Preparation& preparation = PreparationOf(slot, record);
      if (preparation.waiters.empty() && !preparation.begun) {
        asked_.push_back(slot.preparation);
        work_.notify_one();
      }
      preparation.waiters.push_back({deadline, std::move(done)});
      ++waiting_;
      return;
    }
  }
  done(std::move(answer));
}

void PreparedLayers::PrepareAhead(const std::shared_ptr<const LayerRecord>& record, bool pinned) {
  Dropped dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = SlotOf(record, dropped);
  slot.pinned = pinned;
  if (slot.prepared || slot.preparation || stopping_) return;
  PreparationOf(slot, record).ahead = true;
  ahead_.push_back(slot.preparation);
  work_.notify_one();
}

void PreparedLayers::DropOthers(std::string_view name, const std::shared_ptr<const LayerRecord>& record) {
  Dropped dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = slots_.find(name);
  if (found == slots_.end() || (record && found->second.version.lock() == record)) return;
  Unload(found->second, dropped);
  slots_.erase(found);
}

std::vector<std::string> PreparedLayers::Names() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> names;
  names.reserve(slots_.size());
  for (const auto& [name, slot] : slots_) names.push_back(name);
  return names;
}

PreparedLayers::Known PreparedLayers::KnownOf(const std::shared_ptr<const LayerRecord>& record) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = slots_.find(record->info().name);
  if (found == slots_.end() || found->second.version.lock() != record) return {};
  return {found->second.prepared != nullptr, found->second.content_hash};
}

PreparedLayersStats PreparedLayers::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {memory_.used_bytes(), static_cast<int64_t>(by_use_.size()), preparations_, evictions_};
}

PreparedLayers::Slot& PreparedLayers::SlotOf(const std::shared_ptr<const LayerRecord>& record, Dropped& dropped) {
  Slot& slot = slots_[record->info().name];
  if (slot.version.lock() == record) return slot;
  // A preparation of the older version that is under way is let go: those who wait for it asked while it was current.
  Unload(slot, dropped);
  slot = Slot();
  slot.version = record;
  slot.content_hash = record->info().content_hash;
  return slot;
}

void PreparedLayers::Unload(Slot& slot, Dropped& dropped) {
  if (!slot.prepared) return;
  dropped.push_back(std::move(slot.prepared));
  slot.prepared.reset();
  slot.record.reset();
  by_use_.erase(slot.place);
}

PreparedLayers::Preparation& PreparedLayers::PreparationOf(Slot& slot,
                                                           const std::shared_ptr<const LayerRecord>& record) {
  if (!slot.preparation) {
    slot.preparation = std::make_shared<Preparation>();
    slot.preparation->record = record;
    slot.preparation->content_hash = slot.content_hash;
    slot.preparation->pinned = slot.pinned;
  }
  return *slot.preparation;
}

// The last deadline of those who wait for it.
absl::Time PreparedLayers::WantedUntil(const Preparation& preparation) const {
  absl::Time last = absl::InfinitePast();
  for (const Waiter& waiter : preparation.waiters) last = std::max(last, waiter.deadline);
  return last;
}

void PreparedLayers::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !asked_.empty() || !ahead_.empty(); });
    if (stopping_) return;
    auto& queue = asked_.empty() ? ahead_ : asked_;
    const std::shared_ptr<Preparation> preparation = std::move(queue.front());
    queue.pop_front();
    const auto slot = slots_.find(preparation->record->info().name);
    const bool current = slot != slots_.end() && slot->second.preparation == preparation;
    // It may have stood in both queues, and nobody may want it any more.
    if (preparation->begun || (!current && preparation->waiters.empty())) continue;
    preparation->begun = true;
    lock.unlock();
    Run(preparation);
    lock.lock();
  }
}

void PreparedLayers::Run(const std::shared_ptr<Preparation>& preparation) {
  const absl::Time start = absl::Now();
  const LayerInfo& info = preparation->record->info();
  bool for_all = true;
  auto claim = TakeMemory(*preparation, for_all);
  const bool begun = claim.ok();
  Prepared prepared = begun ? Read(*preparation, *std::move(claim)) : Prepared(claim.status());
  std::vector<Waiter> waiters;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (begun) loading_bytes_ -= PreparedBytes(info);
    if (!for_all && WantedUntil(*preparation) > absl::Now()) {
      preparation->begun = false;
      asked_.push_back(preparation);
      work_.notify_one();
      return;
    }
    waiters.swap(preparation->waiters);
    waiting_ -= static_cast<int64_t>(waiters.size());
    if (prepared.ok()) ++preparations_;
    const auto found = slots_.find(info.name);
    if (found != slots_.end() && found->second.preparation == preparation) {
      Slot& slot = found->second;
      slot.preparation.reset();
      if (prepared.ok()) {
        slot.prepared = *prepared;
        slot.record = preparation->record;
        slot.content_hash = (*prepared)->content_hash;
        slot.place = by_use_.insert(by_use_.begin(), &slot);
      }
    }
  }
  memory_.Changed();  // what is prepared now can be evicted
  const absl::Status status = prepared.status();
  Answer(std::move(waiters), std::move(prepared));
  // That nothing was tried, or that another version is read instead, is nothing for the log.
  const absl::StatusCode code = status.code();
  const bool is_news = begun ? code != absl::StatusCode::kNotFound : code == absl::StatusCode::kResourceExhausted;
  if (is_news && options_.on_event) {
    options_.on_event({info.name, status, preparation->ahead, PreparedBytes(info), absl::Now() - start});
  }
}

void PreparedLayers::Answer(std::vector<Waiter> waiters, Prepared prepared) {
  while (!waiters.empty()) {
    Waiter waiter = std::move(waiters.back());
    waiters.pop_back();
    if (waiter.deadline <= absl::Now()) {
      waiter.done(Expired());
    } else if (!prepared.ok()) {
      // Each gets its own: copies share their text, by a count inside Abseil that ThreadSanitizer does not see.
      const absl::Status& status = prepared.status();
      waiter.done(WithDetails(status.code(), std::string(status.message()), DetailsOf(status)));
    } else {
      // With the last one it is in the callers' hands alone.
      waiter.done(waiters.empty() ? std::exchange(prepared, Expired()) : prepared);
    }
  }
}

// Claims the memory of a layer, and makes room for it. `for_all` becomes false where the refusal does not hold for a call
// that joins meanwhile.
absl::StatusOr<LayerMemory::Claim> PreparedLayers::TakeMemory(const Preparation& preparation, bool& for_all) {
  const int64_t bytes = PreparedBytes(preparation.record->info());
  const absl::Time give_up = absl::Now() + options_.memory_wait;
  for (;;) {
    Dropped dropped;
    const uint64_t changes = memory_.changes();
    absl::Time until = give_up;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for_all = false;
      if (stopping_) return Draining();
      if (!preparation.ahead) {
        const absl::Time wanted_until = WantedUntil(preparation);
        if (wanted_until <= absl::Now()) return Expired();
        until = std::min(until, wanted_until);
      }
      for_all = true;
      if (auto claim = memory_.Take(bytes)) {
        loading_bytes_ += bytes;
        return *std::move(claim);
      }
      const auto victim = Victim(bytes);
      if (!victim.ok()) return victim.status();
      if (preparation.ahead && !preparation.pinned && preparation.waiters.empty()) {
        for_all = false;
        return Overloaded("no room for a layer that no call has asked for (--layer_memory_mib)", kRetryDelayMs);
      }
      if (*victim != nullptr) {
        Unload(**victim, dropped);
        ++evictions_;
      }
    }
    if (!dropped.empty()) continue;
    if (absl::Now() >= give_up) {
      return Overloaded(absl::StrCat("busy: calls use the ", memory_.total_bytes(),
                                     " bytes that layers may take (--layer_memory_mib)"),
                        kRetryDelayMs);
    }
    memory_.WaitForChange(changes, until);
  }
}

// The layer that is to lose its place for one of so many bytes that does not fit; null where none is. RESOURCE_EXHAUSTED
// where it would not fit even alone.
absl::StatusOr<PreparedLayers::Slot*> PreparedLayers::Victim(int64_t bytes) {
  int64_t kept = 0, pinned = 0;
  Slot* idle = nullptr;
  Slot* oldest = nullptr;
  for (auto place = by_use_.rbegin(); place != by_use_.rend(); ++place) {
    Slot& slot = **place;
    const int64_t slot_bytes = slot.prepared->memory_bytes;
    kept += slot_bytes;
    if (slot.pinned) {
      pinned += slot_bytes;
      continue;
    }
    if (oldest == nullptr) oldest = &slot;
    if (idle == nullptr && slot.prepared.use_count() == 1) idle = &slot;
  }
  const int64_t total = memory_.total_bytes();
  if (bytes > total - pinned) {
    return TooLarge("layer", "LAYER_TOO_LARGE",
                    absl::StrCat("expected a layer of at most ", total - pinned, " bytes, all that ",
                                 pinned == 0 ? "layers may take" : "pinned layers leave", " (--layer_memory_mib), got ",
                                 bytes, " bytes"));
  }
  if (idle != nullptr) return idle;
  // What calls use gives its memory back only when they are done, and when it has lost its place. Where what has lost its
  // place already will do, nothing else need lose it.
  return kept + loading_bytes_ + bytes > total ? oldest : nullptr;
}

PreparedLayers::Prepared PreparedLayers::Read(const Preparation& preparation, LayerMemory::Claim claim) const {
  auto prepared = PrepareLayer(*preparation.record, arena_, std::move(claim));
  if (!prepared.ok() || preparation.content_hash.empty()) return prepared;
  const std::string& hash = (*prepared)->content_hash;
  if (hash == preparation.content_hash) return prepared;
  ErrorDetails details;
  details.reason = "LAYER_DAMAGED";
  details.field = "layer";
  return WithDetails(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("layer: its weights are not what they were: expected the content hash ",
                                  preparation.content_hash, ", got ", hash),
                     details);
}

}  // namespace layerd
