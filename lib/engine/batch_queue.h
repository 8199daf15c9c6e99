// Calls that wait, and which of them are computed next, together.
//
// Calls of one *kind* (one resident layer, the same dtypes, all with or all without the values inside) may be computed
// together; a call that may not be is a kind of its own. A *turn* is one batch, of calls of one kind.
//
// Whose turn it is: the kind whose earliest deadline comes first; of equal ones, as where there are no deadlines, the one
// that has waited longest, since its first call came or since its last turn, so that layers take turns. Within a kind:
// the call with the earliest deadline, then the one that came first. And whoever has waited longest is passed over at most
// kMostPassedOver times in a row, by kinds and within a kind alike, so that no deadlines of others keep a layer, or a call
// without one, waiting for ever.
//
// Heavy kinds are those whose products are divided over all threads; Pop() leaves them out while one is being computed.
//
// Threads: none of its own and no lock; BatchingEngine guards it.
#ifndef LAYERD_LIB_ENGINE_BATCH_QUEUE_H_
#define LAYERD_LIB_ENGINE_BATCH_QUEUE_H_

#include <chrono>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

// What calls must have in common to be computed together.
struct BatchKind {
  const PackedFeedForward* layer;
  DType input_dtype;
  DType output_dtype;
  bool intermediates;
  auto operator<=>(const BatchKind&) const = default;
};

struct BatchTraits {
  std::optional<BatchKind> kind;  // nothing: it is computed alone
  bool heavy = false;             // the same for all calls of a kind, as is `join_rows`
  int64_t rows = 1;               // that are not computed yet
  int64_t join_rows = 0;          // most rows in a batch of several calls
  int64_t part_rows = 0;          // a call of more is divided into parts of so many; 0: it is not divided
};

class QueuedCall;

// A call, and how many rows of it.
struct BatchShare {
  std::unique_ptr<QueuedCall> call;
  int64_t rows;
};

// Gets what must wait again: what is left of a divided call, and calls to be tried again alone.
using BatchDone = absl::AnyInvocable<void(std::vector<std::unique_ptr<QueuedCall>> again)>;

// A call in the queue.
class QueuedCall {
 public:
  explicit QueuedCall(const BatchTraits& call_traits) : traits(call_traits) {}
  virtual ~QueuedCall() = default;

  virtual const CallContext& context() const = 0;
  // Answers the call with an error.
  virtual void Fail(absl::Status error) = 0;
  // Has `shares`, the first of which is of this call, computed by `inner` as one call of it, answers the calls that are
  // then complete, and calls `done` after that, exactly once.
  virtual void Compute(LayerEngine& inner, std::vector<BatchShare> shares, BatchDone done) = 0;

  BatchTraits traits;  // not to be changed in the queue

 private:
  friend class BatchQueue;
  int64_t sequence_ = 0;  // order of arrival; of what is left of a divided call, the order in which it came back
};

// Calls that nobody waits for any more, with the error to answer.
using UnwantedCalls = std::vector<std::pair<std::unique_ptr<QueuedCall>, absl::Status>>;

struct Batch {
  std::vector<BatchShare> shares;  // of one kind
  UnwantedCalls unwanted;          // that were met on the way
};

class BatchQueue {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int kMostPassedOver = 3;

  BatchQueue();
  ~BatchQueue();

  // `ripe`: until then calls of this kind wait for company, unless there are `join_rows` rows of them.
  void Push(std::unique_ptr<QueuedCall> call, Clock::time_point ripe = Clock::time_point::min());

  // The next turn, of the kinds that are ripe. The whole of a call is taken, or of one that is to be divided as much as there
  // is room for. No shares: nothing can have a turn.
  Batch Pop(bool heavy_too);

  // Takes out all that nobody waits for.
  UnwantedCalls TakeUnwanted();

  // Lets kinds have their turns that became ripe until `now`.
  void Ripen(Clock::time_point now);
  // When the next one does; nothing: none waits for company.
  std::optional<Clock::time_point> NextRipe() const;

  int64_t size() const { return size_; }  // calls

 private:
  struct Kind;
  // Calls of a kind, or kinds, by deadline and then since when they wait, and by the latter alone.
  using Urgency = std::pair<absl::Time, int64_t>;
  struct Lane {
    std::map<Urgency, Kind*> by_urgency;
    std::map<int64_t, Kind*> by_wait;
  };

  Kind* Choose(bool heavy_too);
  std::unique_ptr<QueuedCall> TakeOut(Kind& kind, std::map<int64_t, std::unique_ptr<QueuedCall>>::iterator place);
  void Fill(Kind& kind, Batch& batch);
  void Remove(Kind* kind);
  void List(Kind& kind);
  void Unlist(Kind& kind);

  std::map<BatchKind, std::unique_ptr<Kind>> together_;
  std::map<Kind*, std::unique_ptr<Kind>> alone_;
  Lane lanes_[2];                                         // ripe kinds: light ones, heavy ones
  std::set<std::pair<Clock::time_point, Kind*>> unripe_;  // the others
  int passed_over_[2] = {0, 0};  // turns in a row that passed over who has waited longest, without and with heavy ones
  int64_t sequence_ = 0;
  int64_t size_ = 0;
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_BATCH_QUEUE_H_
