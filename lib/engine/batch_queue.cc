#include "lib/engine/batch_queue.h"

#include <algorithm>
#include <utility>

namespace layerd {
namespace {

// Whether to take the one that has waited longest, where `urgent_is_oldest` or it was passed over often enough; counts
// how often in a row it is.
bool TakesOldest(int& passed_over, bool urgent_is_oldest) {
  const bool takes = urgent_is_oldest || passed_over == BatchQueue::kMostPassedOver;
  passed_over = takes ? 0 : passed_over + 1;
  return takes;
}

}  // namespace

struct BatchQueue::Kind {
  bool Ripe() const { return ripe == Clock::time_point::min(); }
  Urgency urgency() const { return {by_urgency.begin()->first.first, since}; }

  std::optional<BatchKind> key;
  bool heavy;
  int64_t since;           // when its first call came, or its last turn was
  Clock::time_point ripe;  // min(): it is
  int64_t rows = 0;        // of all its calls
  int passed_over = 0;     // calls taken in a row that passed over the one that has waited longest
  std::map<Urgency, QueuedCall*> by_urgency;
  std::map<int64_t, std::unique_ptr<QueuedCall>> by_wait;
};

BatchQueue::BatchQueue() = default;
BatchQueue::~BatchQueue() = default;

// A kind is listed while it has calls and is not being changed.
void BatchQueue::List(Kind& kind) {
  if (!kind.Ripe()) {
    unripe_.emplace(kind.ripe, &kind);
    return;
  }
  Lane& lane = lanes_[kind.heavy];
  lane.by_urgency.emplace(kind.urgency(), &kind);
  lane.by_wait.emplace(kind.since, &kind);
}

void BatchQueue::Unlist(Kind& kind) {
  if (!kind.Ripe()) {
    unripe_.erase({kind.ripe, &kind});
    return;
  }
  Lane& lane = lanes_[kind.heavy];
  lane.by_urgency.erase(kind.urgency());
  lane.by_wait.erase(kind.since);
}

void BatchQueue::Push(std::unique_ptr<QueuedCall> call, Clock::time_point ripe) {
  call->sequence_ = ++sequence_;
  ++size_;
  std::unique_ptr<Kind> fresh;
  std::unique_ptr<Kind>* place = &fresh;
  if (call->traits.kind) place = &together_[*call->traits.kind];
  if (*place == nullptr) {
    *place = std::make_unique<Kind>(Kind{call->traits.kind, call->traits.heavy, call->sequence_, ripe});
  } else {
    Unlist(**place);
  }
  Kind& kind = **place;
  if (fresh != nullptr) alone_.emplace(&kind, std::move(fresh));
  kind.rows += call->traits.rows;
  if (kind.rows >= call->traits.join_rows) kind.ripe = Clock::time_point::min();
  const int64_t sequence = call->sequence_;
  kind.by_urgency.emplace(Urgency(call->context().deadline, sequence), call.get());
  kind.by_wait.emplace(sequence, std::move(call));
  List(kind);
}

BatchQueue::Kind* BatchQueue::Choose(bool heavy_too) {
  Kind* urgent = nullptr;
  Kind* oldest = nullptr;
  for (int heavy = 0; heavy <= static_cast<int>(heavy_too); ++heavy) {
    const Lane& lane = lanes_[heavy];
    if (lane.by_wait.empty()) continue;
    Kind* const first = lane.by_urgency.begin()->second;
    Kind* const longest = lane.by_wait.begin()->second;
    if (urgent == nullptr || first->urgency() < urgent->urgency()) urgent = first;
    if (oldest == nullptr || longest->since < oldest->since) oldest = longest;
  }
  if (urgent == nullptr) return nullptr;
  return TakesOldest(passed_over_[heavy_too], urgent == oldest) ? oldest : urgent;
}

std::unique_ptr<QueuedCall> BatchQueue::TakeOut(Kind& kind,
                                                std::map<int64_t, std::unique_ptr<QueuedCall>>::iterator place) {
  std::unique_ptr<QueuedCall> call = std::move(place->second);
  kind.rows -= call->traits.rows;
  kind.by_urgency.erase({call->context().deadline, call->sequence_});
  kind.by_wait.erase(place);
  --size_;
  return call;
}

// Of a kind that has no calls and is not listed.
void BatchQueue::Remove(Kind* kind) {
  if (kind->key) {
    together_.erase(*kind->key);
  } else {
    alone_.erase(kind);
  }
}

UnwantedCalls BatchQueue::TakeUnwanted() {
  std::vector<Kind*> kinds;
  for (auto& [key, kind] : together_) kinds.push_back(kind.get());
  for (auto& [key, kind] : alone_) kinds.push_back(kind.get());
  UnwantedCalls unwanted;
  for (Kind* const kind : kinds) {
    Unlist(*kind);
    for (auto place = kind->by_wait.begin(); place != kind->by_wait.end();) {
      const auto next = std::next(place);
      if (auto wanted = CheckContext(place->second->context()); !wanted.ok()) {
        unwanted.emplace_back(TakeOut(*kind, place), std::move(wanted));
      }
      place = next;
    }
    if (kind->by_wait.empty()) {
      Remove(kind);
    } else {
      List(*kind);
    }
  }
  return unwanted;
}

// Moves the calls of one turn from `kind`, which is not listed, to `batch`.
void BatchQueue::Fill(Kind& kind, Batch& batch) {
  int64_t rows = 0;
  while (!kind.by_wait.empty()) {
    const auto oldest = kind.by_wait.begin();
    const auto urgent = kind.by_wait.find(kind.by_urgency.begin()->first.second);
    int passed_over = kind.passed_over;
    const auto next = TakesOldest(passed_over, urgent == oldest) ? oldest : urgent;
    const QueuedCall& call = *next->second;
    const BatchTraits& traits = call.traits;
    absl::Status wanted = CheckContext(call.context());
    const bool first = batch.shares.empty();
    int64_t taken = traits.rows;
    if (traits.part_rows > 0) taken = std::min(taken, first ? traits.part_rows : traits.join_rows - rows);
    if (wanted.ok() && !first && (taken <= 0 || rows + taken > traits.join_rows)) return;
    std::unique_ptr<QueuedCall> owned = TakeOut(kind, next);
    if (!wanted.ok()) {
      batch.unwanted.emplace_back(std::move(owned), std::move(wanted));
      continue;
    }
    kind.passed_over = passed_over;
    rows += taken;
    batch.shares.push_back({std::move(owned), taken});
  }
}

Batch BatchQueue::Pop(bool heavy_too) {
  Batch batch;
  while (batch.shares.empty()) {
    Kind* const kind = Choose(heavy_too);
    if (kind == nullptr) break;
    Unlist(*kind);
    Fill(*kind, batch);
    if (!kind->by_wait.empty()) {
      kind->since = ++sequence_;
      List(*kind);
    } else {
      Remove(kind);
    }
  }
  return batch;
}

void BatchQueue::Ripen(Clock::time_point now) {
  while (!unripe_.empty() && unripe_.begin()->first <= now) {
    Kind& kind = *unripe_.begin()->second;
    Unlist(kind);
    kind.ripe = Clock::time_point::min();
    List(kind);
  }
}

std::optional<BatchQueue::Clock::time_point> BatchQueue::NextRipe() const {
  if (unripe_.empty()) return std::nullopt;
  return unripe_.begin()->first;
}

}  // namespace layerd
