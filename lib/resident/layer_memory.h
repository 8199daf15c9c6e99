// A number of bytes that layers may take, and who takes them now.
#ifndef LAYERD_LIB_RESIDENT_LAYER_MEMORY_H_
#define LAYERD_LIB_RESIDENT_LAYER_MEMORY_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/time/time.h"

namespace layerd {

// It only counts: whoever has a claim allocates the bytes. Threads: any. Claims may outlive it.
class LayerMemory {
  struct State;

 public:
  // Some of the bytes, until it is destroyed. Threads: one at a time.
  class Claim {
   public:
    Claim(Claim&& other) noexcept;
    Claim& operator=(Claim&&) = delete;
    ~Claim();

   private:
    friend class LayerMemory;
    Claim(std::shared_ptr<State> state, int64_t bytes);
    std::shared_ptr<State> state_;  // null where it was moved away
    int64_t bytes_;
  };

  explicit LayerMemory(int64_t total_bytes);

  int64_t total_bytes() const;
  int64_t used_bytes() const;

  // Nothing where so many bytes are not free.
  std::optional<Claim> Take(int64_t bytes);

  // Waiting for memory: changes() before it is asked for, and WaitForChange() where it could not be had. A change is a
  // claim that was given back, or a call of Changed().
  uint64_t changes() const;
  void Changed();
  // Waits while there were `seen` changes, at most until `deadline`.
  void WaitForChange(uint64_t seen, absl::Time deadline) const;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_MEMORY_H_
