// Memory that a thread keeps from one product to the next, so that the steady state allocates nothing.
//
// Threads: each has its own. A caller must not hand work to an Arena while it uses OfThread(): its own part of that work
// uses the same. What lasts over such work is OfCall()'s.
#ifndef LAYERD_LIB_KERNELS_SCRATCH_H_
#define LAYERD_LIB_KERNELS_SCRATCH_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace layerd {

class Scratch {
 public:
  // The calling thread's own.
  static Scratch& OfThread() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // The same for whoever divides work over an Arena: a thread divides one thing at a time.
  static Scratch& OfCall() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // `floats` of them, aligned to a cache line, of any content; valid until the next call. Throws std::bad_alloc.
  float* Get(size_t floats) {
    if (floats > size_) {
      const size_t alignment = floats * sizeof(float) < kHugePage ? kCacheLine : kHugePage;
      const size_t bytes = (floats * sizeof(float) + alignment - 1) / alignment * alignment;
      memory_.reset();  // before the new one, so that both are never held
      size_ = 0;
      memory_.reset(static_cast<float*>(std::aligned_alloc(alignment, bytes)));
      if (memory_ == nullptr) throw std::bad_alloc();
      if (alignment == kHugePage) madvise(memory_.get(), bytes, MADV_HUGEPAGE);
      size_ = bytes / sizeof(float);
    }
    return memory_.get();
  }

 private:
  static constexpr size_t kCacheLine = 64;
  static constexpr size_t kHugePage = size_t{2} << 20;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_SCRATCH_H_
