// A bound on the bytes that many hold together, and a line of those who wait for their part.
#ifndef LAYERD_LIB_BASE_BYTE_BUDGET_H_
#define LAYERD_LIB_BASE_BYTE_BUDGET_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace layerd {

// Shares are given in the order in which they were asked for. A share that is larger than the whole budget is given where
// nobody has any.
//
// Threads: any. It must outlive its shares, and whoever waits must have got theirs or left the line.
class ByteBudget {
 public:
  // Bytes of the budget, given back by the destructor. Movable; one thread at a time.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept { *this = std::move(other); }
    Share& operator=(Share&& other) noexcept;
    ~Share() { ShrinkTo(0); }

    int64_t bytes() const { return bytes_; }
    // Gives back what is more than `bytes`.
    void ShrinkTo(int64_t bytes);

   private:
    friend class ByteBudget;
    Share(ByteBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
    ByteBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };

  // A place in the line.
  using Ticket = uint64_t;
  using Granted = absl::AnyInvocable<void(absl::StatusOr<Share>)>;

  // At most `waiting_limit` may stand in line; `flag` is what sets `bytes`.
  ByteBudget(int64_t bytes, int waiting_limit, std::string_view flag);

  // A share, if it can be had at once and nobody waits.
  std::optional<Share> TryTake(int64_t bytes);

  // Stands in line for a share; `granted` is called with it once, on a thread of whoever gives bytes back or leaves, or
  // on this one before this returns; it must not block. RESOURCE_EXHAUSTED, with the time to try again, where others wait
  // and the line is full, or `deadline` is expected to pass before it is this one's turn: as measured by how fast the line
  // moves.
  absl::StatusOr<Ticket> Wait(int64_t bytes, absl::Time deadline, Granted granted);
  // From now on nobody waits: those in line are granted `error`, and so is whoever comes.
  void Close(const absl::Status& error);
  // Leaves the line. True: it still stood there, and nothing will be granted.
  bool Leave(Ticket ticket);

  // The error for a caller who did not get a share and does not wait.
  absl::Status Full() const;
  // Whether anyone waits, or was turned away within the last second.
  bool IsShort() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Waiting {
    int64_t bytes;
    Granted granted;
  };

  bool HasRoom(int64_t bytes) const { return held_ == 0 || held_ + bytes <= bytes_; }
  void GiveBack(int64_t bytes);
  void Advance(std::unique_lock<std::mutex>& lock);
  double ExpectedSeconds() const;
  int64_t RetryDelayMs() const;

  const int64_t bytes_;
  const size_t waiting_limit_;
  const std::string_view flag_;
  mutable std::mutex mutex_;
  // Guarded by mutex_, from here on.
  int64_t held_ = 0;
  Ticket tickets_ = 0;
  std::map<Ticket, Waiting> line_;
  absl::Status closed_;
  bool serving_ = false;             // a thread is in Advance()
  Clock::time_point moved_;          // when the line began, or last moved
  double mean_turn_seconds_ = 0.0;   // from one turn to the next; exponentially weighted
  mutable Clock::time_point short_;  // when somebody was last turned away
};

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_BYTE_BUDGET_H_
