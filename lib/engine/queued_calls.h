// The calls of BatchingEngine's queue, and how rows of several are computed as one call.
//
// Calls of one resident layer that ask for the same are joined: their rows are copied into one input, and each answer out of
// the joint one, which else would live as long as the last of them. A call of many rows may be divided: its answer is put
// together from those of its parts. A call that is neither goes through as it is. N1 makes all of it invisible.
//
// A joint call is wanted as long as its last deadline has not passed. If it fails, those of its calls that are still
// wanted are tried again, each alone, so that none suffers for another. Memory for the joint input that cannot be had is
// such a failure. If a part fails the whole call has that error, and the rest is dropped.
//
// Threads: a call belongs to one thread at a time.
#ifndef LAYERD_LIB_ENGINE_QUEUED_CALLS_H_
#define LAYERD_LIB_ENGINE_QUEUED_CALLS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lib/engine/batch_queue.h"
#include "lib/engine/call_check.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

struct BatchSizes {
  // Most rows of several calls that are computed together; a call of more is divided. At least 1.
  int64_t batch_rows = 128;
  // Layers of so many weights and more are heavy: a product with one row reads them from memory, by all threads. They
  // take turns, since two at a time would each have half of the bandwidth, and half of the rows that arrive.
  int64_t heavy_weights = int64_t{1} << 20;
  // Parts of calls are at least so much work, in multiply-adds (some milliseconds), so that calls for small layers are not
  // taken apart for nothing.
  int64_t least_part_work = int64_t{1} << 28;
  // The inner engine's.
  CallLimits limits;
};

// How the call may be joined with others and divided. Looks at shapes alone, and needs no check before it.
BatchTraits TraitsOf(const NormalizeCall& call, const BatchSizes& sizes);
BatchTraits TraitsOf(const FeedForwardCall& call, const BatchSizes& sizes);

// A call that goes through as it is; `finished`, called with no argument after `done`, has the rest.
template <typename Finished>
void PassOn(LayerEngine& inner, NormalizeCall&& call, NormalizeDone done, Finished finished) {
  inner.Normalize(std::move(call), [done = std::move(done),
                                    finished = std::move(finished)](absl::StatusOr<NormalizeResult> result) mutable {
    done(std::move(result));
    done = nullptr;  // what it holds is free before the next turn
    finished();
  });
}
template <typename Finished>
void PassOn(LayerEngine& inner, FeedForwardCall&& call, FeedForwardDone done, Finished finished) {
  inner.FeedForward(std::move(call), [done = std::move(done), finished = std::move(finished)](
                                         absl::StatusOr<FeedForwardResult> result) mutable {
    done(std::move(result));
    done = nullptr;
    finished();
  });
}

class QueuedNormalize : public QueuedCall {
 public:
  QueuedNormalize(NormalizeCall call, NormalizeDone done, const BatchTraits& call_traits)
      : QueuedCall(call_traits), call_(std::move(call)), done_(std::move(done)) {}

  const CallContext& context() const override { return call_.context; }
  void Fail(absl::Status error) override { done_(std::move(error)); }
  void Compute(LayerEngine& inner, std::vector<BatchShare> shares, BatchDone done) override;

 private:
  NormalizeCall call_;
  NormalizeDone done_;
};

class QueuedFeedForward : public QueuedCall {
 public:
  // With TraitsOf(call, …); divided calls must have passed CheckCall().
  QueuedFeedForward(FeedForwardCall call, FeedForwardDone done, const BatchTraits& call_traits)
      : QueuedCall(call_traits), call_(std::move(call)), done_(std::move(done)), all_rows_(traits.rows) {}

  const CallContext& context() const override { return call_.context; }
  void Fail(absl::Status error) override { done_(std::move(error)); }
  void Compute(LayerEngine& inner, std::vector<BatchShare> shares, BatchDone done) override;

 private:
  using Shares = std::vector<std::pair<std::unique_ptr<QueuedFeedForward>, int64_t>>;  // call, rows

  // The call itself with the next rows of `shares` as input. Throws std::bad_alloc.
  static FeedForwardCall JointCall(const Shares& shares);
  static void Answer(Shares shares, absl::StatusOr<FeedForwardResult> result, BatchDone done);
  // The error of a joint call: answers those whose own it is, and gives the others back, to be computed alone.
  static std::vector<std::unique_ptr<QueuedCall>> TryAgain(Shares& shares);

  Tensor Rows(int64_t count) const;  // the next ones, as [count, d]
  MemoryPlace OutputOfRows() const;  // where theirs goes, of a call with output_memory
  // Takes the answer to the next `count` rows: those of `joint` from `first` on. True when the call is answered.
  bool Take(const FeedForwardResult& joint, int64_t first, int64_t count);

  FeedForwardCall call_;
  FeedForwardDone done_;
  const int64_t all_rows_;
  FeedForwardResult result_;  // of a divided call, as far as it is there
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_QUEUED_CALLS_H_
