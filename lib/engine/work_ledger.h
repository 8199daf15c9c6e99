// What an engine has accepted and not answered, and how fast it gets through it: tells whether a call would be in time.
#ifndef LAYERD_LIB_ENGINE_WORK_LEDGER_H_
#define LAYERD_LIB_ENGINE_WORK_LEDGER_H_

#include <cstdint>
#include <map>
#include <utility>

#include "absl/time/time.h"

namespace layerd {

// Supposes that as many as there are workers are under way, those that came first; that the others are begun in the order
// of their deadlines; and that those with later ones, or none, get a quarter of the machine nonetheless
// (lib/engine/batch_queue.h). Work is in multiply-adds (lib/engine/call_check.h).
//
// The rate is what was done, of late, in the time in which there was something to do. While fewer calls than twice
// `workers` are there the machine may not be busy, and so a rate measured then counts only where it is the highest yet.
//
// Threads: none of its own and no lock.
class WorkLedger {
 public:
  using Entries = std::map<std::pair<absl::Time, int64_t>, double>;  // deadline and number: work
  using Entry = Entries::iterator;

  explicit WorkLedger(int workers);

  // By how much a call that came `now` would miss its deadline, or make one miss its own that was accepted. Zero: by
  // nothing, with something to spare; always so where there is no other call.
  absl::Duration Lateness(absl::Time now, absl::Time deadline, double work) const;

  Entry Add(absl::Time now, absl::Time deadline, double work);
  // `computed`: the work was done, and not given up.
  void Remove(absl::Time now, Entry entry, bool computed);

  bool empty() const { return entries_.empty(); }
  // What so much work takes at the rate of late, by all workers together.
  absl::Duration Needed(double work) const { return absl::Seconds(work * seconds_of_work_); }

 private:
  double UnderWayBehind(absl::Time now, const std::pair<absl::Time, int64_t>& key) const;

  const size_t workers_;
  Entries entries_;
  std::map<int64_t, Entry> by_age_;
  int64_t numbers_ = 0;
  double seconds_of_work_;  // for one multiply-add, all workers together
  absl::Time since_;        // when the first call came after none was there, or the last one was done
  double done_work_ = 0.0, done_seconds_ = 0.0;  // of late
};

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_WORK_LEDGER_H_
