// Ends calls whose callers keep memory that others want, since they take too long to send a request or to take an answer.
#ifndef LAYERD_SERVER_STALL_WATCH_H_
#define LAYERD_SERVER_STALL_WATCH_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace layerd {

// A caller may take as long as it likes while there is memory for others. Threads: any.
class StallWatch {
 public:
  // Something that waits for its caller: a read or a write.
  class Wait {
   public:
    virtual ~Wait() = default;
    // Ends the call with `status`, or breaks it off.
    virtual void EndStalled(const absl::Status& status) = 0;

   private:
    friend class StallWatch;
    std::chrono::steady_clock::time_point since_;
    std::list<Wait*>::iterator place_;
    bool watched_ = false;
  };

  // Ends what has waited for `limit` while `is_short` says that others want memory.
  StallWatch(absl::Duration limit, std::function<bool()> is_short);
  ~StallWatch();

  void Begin(Wait& wait);
  // False where it was not begun, or EndStalled() was called; that has returned then, but where it calls this itself.
  bool End(Wait& wait);

 private:
  using Clock = std::chrono::steady_clock;
  void Watch();

  const absl::Duration limit_;
  const std::function<bool()> is_short_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;     // guarded by mutex_
  std::list<Wait*> waiting_;  // guarded by mutex_; in the order in which they began
  Wait* ending_ = nullptr;    // guarded by mutex_; whose EndStalled() is under way
  std::condition_variable ended_;
  std::thread watcher_;  // last: it uses the rest
};

}  // namespace layerd

#endif  // LAYERD_SERVER_STALL_WATCH_H_
