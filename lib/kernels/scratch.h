// Memory that a thread keeps from one product to the next, so that the steady state allocates nothing.
//
// Threads: each has its own. A caller must not hand work to an Arena while it uses its scratch.
#ifndef LAYERD_LIB_KERNELS_SCRATCH_H_
#define LAYERD_LIB_KERNELS_SCRATCH_H_

#include <cstddef>
#include <cstdlib>
#include <exception>
#include <memory>

namespace layerd {

class Scratch {
 public:
  // The calling thread's own.
  static Scratch& OfThread() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // `floats` of them, aligned to a cache line, of any content; valid until the next call. Running out of memory ends
  // the program, as it does for any small allocation here.
  float* Get(size_t floats) noexcept {
    if (floats > size_) {
      const size_t bytes = (floats * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
      memory_.reset();  // before the new one, so that both are never held
      memory_.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
      if (memory_ == nullptr) std::terminate();
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_SCRATCH_H_
