#include "lib/engine/work_ledger.h"

#include <algorithm>
#include <cmath>

namespace layerd {
namespace {

// What a worker does a second until it is measured: about what a core with AVX2 can.
constexpr double kFirstRate = 3e10;
// Work done so long ago counts 1/e.
constexpr double kMemorySeconds = 0.5;
// What an estimate must leave: as much again as others take, so that a call is in time though the machine should have half
// as much for it from now on; a quarter of what the call takes itself; and what it takes to receive and answer.
constexpr double kSlackOfOthers = 2, kSlack = 1.25;
constexpr absl::Duration kLeastSlack = absl::Milliseconds(2);
// Others, with later deadlines, get so much of the machine.
constexpr double kPassedOver = 4.0 / 3;

}  // namespace

WorkLedger::WorkLedger(int workers)
    : workers_(static_cast<size_t>(std::max(1, workers))), seconds_of_work_(1 / (kFirstRate * std::max(1, workers))) {}

// Work that is under way, begun when the last call was done, though it comes after `key`.
double WorkLedger::UnderWayBehind(absl::Time now, const std::pair<absl::Time, int64_t>& key) const {
  double work = 0.0;
  size_t count = 0;
  for (auto [number, entry] : by_age_) {
    if (count++ == workers_) break;
    if (entry->first > key) work += entry->second;
  }
  return std::max(0.0, work - absl::ToDoubleSeconds(now - since_) / seconds_of_work_);
}

absl::Duration WorkLedger::Lateness(absl::Time now, absl::Time deadline, double work) const {
  if (entries_.empty()) return absl::ZeroDuration();
  const std::pair key(deadline, numbers_ + 1);
  const auto later = entries_.upper_bound(key);
  const bool alone = later == entries_.end();
  const auto late = [&](double others, double own, absl::Time then) {
    return Needed(others * kSlackOfOthers + own * kSlack) * (alone ? 1 : kPassedOver) + kLeastSlack - (then - now);
  };
  double before = 0.0;
  for (auto entry = entries_.begin(); entry != later; ++entry) before += entry->second;
  absl::Duration most = std::max(absl::ZeroDuration(), late(before + UnderWayBehind(now, key), work, deadline));
  for (auto entry = later; entry != entries_.end() && entry->first.first != absl::InfiniteFuture(); ++entry) {
    const auto& [of, own] = *entry;
    const absl::Duration after = late(before + work, own, of.first);
    if (after > most && late(before, own, of.first) <= absl::ZeroDuration()) most = after;
    before += own;
  }
  return most;
}

WorkLedger::Entry WorkLedger::Add(absl::Time now, absl::Time deadline, double work) {
  if (entries_.empty()) since_ = now;
  const auto entry = entries_.emplace(std::pair(deadline, ++numbers_), work).first;
  by_age_.emplace_hint(by_age_.end(), numbers_, entry);
  return entry;
}

void WorkLedger::Remove(absl::Time now, Entry entry, bool computed) {
  if (computed) {
    const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - since_));
    const double kept = std::exp(-seconds / kMemorySeconds);
    done_work_ = done_work_ * kept + entry->second;
    done_seconds_ = done_seconds_ * kept + seconds;
    since_ = now;
    const double observed = done_seconds_ / done_work_;
    const bool busy = entries_.size() >= 2 * workers_;
    if (done_work_ > 0) seconds_of_work_ = busy ? observed : std::min(seconds_of_work_, observed);
  }
  by_age_.erase(entry->first.second);
  entries_.erase(entry);
}

}  // namespace layerd
