#include "lib/base/byte_budget.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

constexpr int64_t kLeastDelayMs = 10, kMostDelayMs = 60000;
constexpr std::chrono::seconds kShortFor{1};

}  // namespace

ByteBudget::Share& ByteBudget::Share::operator=(Share&& other) noexcept {
  ShrinkTo(0);
  budget_ = std::exchange(other.budget_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void ByteBudget::Share::ShrinkTo(int64_t bytes) {
  if (bytes >= bytes_) return;
  const int64_t held = std::exchange(bytes_, bytes);
  budget_->GiveBack(held - bytes);
}

ByteBudget::ByteBudget(int64_t bytes, int waiting_limit, std::string_view flag)
    : bytes_(bytes), waiting_limit_(static_cast<size_t>(waiting_limit)), flag_(flag) {}

std::optional<ByteBudget::Share> ByteBudget::TryTake(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!line_.empty() || !HasRoom(bytes)) return std::nullopt;
  held_ += bytes;
  return Share(this, bytes);
}

absl::StatusOr<ByteBudget::Ticket> ByteBudget::Wait(int64_t bytes, absl::Time deadline, Granted granted) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closed_.ok()) return closed_;
  // The first in line may always try: how fast the line moved some time ago says little.
  const bool full = line_.size() >= waiting_limit_;
  if (!line_.empty() && (full || absl::Now() + absl::Seconds(ExpectedSeconds()) > deadline)) {
    short_ = Clock::now();
    return Overloaded(absl::StrCat("busy: ", line_.size(), " calls wait for memory already (", std::string(flag_), ")",
                                   full ? "" : ", and the deadline is expected to pass before it is this one's turn"),
                      RetryDelayMs());
  }
  if (line_.empty()) moved_ = Clock::now();
  const Ticket ticket = ++tickets_;
  line_.emplace(ticket, Waiting{bytes, std::move(granted)});
  Advance(lock);
  return ticket;
}

void ByteBudget::Close(const absl::Status& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = error;
  while (!line_.empty()) {
    Waiting first = std::move(line_.begin()->second);
    line_.erase(line_.begin());
    lock.unlock();
    first.granted(error);
    lock.lock();
  }
}

bool ByteBudget::Leave(Ticket ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool left = line_.erase(ticket) == 1;
  Advance(lock);  // it may have stood before smaller ones
  return left;
}

absl::Status ByteBudget::Full() const {
  std::lock_guard<std::mutex> lock(mutex_);
  short_ = Clock::now();
  return Overloaded(absl::StrCat("busy: ", held_, " bytes of calls are in flight (", std::string(flag_), ")"),
                    RetryDelayMs());
}

bool ByteBudget::IsShort() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !line_.empty() || (short_ != Clock::time_point() && Clock::now() - short_ < kShortFor);
}

void ByteBudget::GiveBack(int64_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  held_ -= bytes;
  Advance(lock);
}

// With mutex_ held: serves those whose turn it is. One thread at a time, and so one after the other, however soon they give
// their shares back.
void ByteBudget::Advance(std::unique_lock<std::mutex>& lock) {
  if (serving_) return;
  serving_ = true;
  while (!line_.empty() && HasRoom(line_.begin()->second.bytes)) {
    Waiting first = std::move(line_.begin()->second);
    line_.erase(line_.begin());
    held_ += first.bytes;
    const auto now = Clock::now();
    const std::chrono::duration<double> took = now - std::exchange(moved_, now);
    mean_turn_seconds_ += 0.125 * (took.count() - mean_turn_seconds_);
    lock.unlock();
    first.granted(Share(this, first.bytes));
    lock.lock();
  }
  serving_ = false;
}

// With mutex_ held: until it were the turn of one more.
double ByteBudget::ExpectedSeconds() const { return mean_turn_seconds_ * static_cast<double>(line_.size() + 1); }

// With mutex_ held: when to try again. Later and later while the line stands still.
int64_t ByteBudget::RetryDelayMs() const {
  const std::chrono::duration<double> standing = line_.empty() ? Clock::duration::zero() : Clock::now() - moved_;
  const double seconds = std::max(ExpectedSeconds(), standing.count());
  return std::clamp<int64_t>(static_cast<int64_t>(std::ceil(seconds * 1000)), kLeastDelayMs, kMostDelayMs);
}

}  // namespace layerd
