// Memory for large tensors, kept for the next one.
//
// The system clears the pages of fresh memory one by one as they are touched, which takes as long as to normalise what is
// put there. What a tensor leaves behind is used again instead, up to a limit.
#ifndef LAYERD_LIB_BASE_BUFFER_POOL_H_
#define LAYERD_LIB_BASE_BUFFER_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace layerd {

// Threads: any. Buffers may outlive the pool.
class BufferPool {
 public:
  // Buffers below this size are not kept: the C library reuses them anyway.
  static constexpr size_t kLeastBytes = size_t{256} << 10;

  // The process's own, which Tensor::Allocate() uses.
  static BufferPool& OfProcess();

  // Keeps at most `most_kept_bytes` of free buffers.
  explicit BufferPool(size_t most_kept_bytes) : shelf_(std::make_shared<Shelf>(most_kept_bytes)) {}

  // `bytes` of memory of any content, aligned to a cache line; of at least 4 MiB, in huge pages where the system grants
  // them. It comes back to the pool with the last copy. Throws std::bad_alloc.
  std::shared_ptr<std::byte> Get(size_t bytes);

  // Of free buffers.
  size_t kept_bytes() const;

 private:
  struct Buffer {
    std::byte* data;
    size_t bytes;
  };
  class Shelf {
   public:
    explicit Shelf(size_t most_kept_bytes) : most_kept_bytes_(most_kept_bytes) {}
    ~Shelf();
    // The best of those that fit without much waste; a null one where there is none.
    Buffer Take(size_t bytes);
    void Put(Buffer buffer);
    size_t kept_bytes() const;

   private:
    static void Free(Buffer buffer);

    const size_t most_kept_bytes_;
    mutable std::mutex mutex_;
    std::vector<Buffer> free_;  // guarded by mutex_; the one that came last is last
    size_t kept_bytes_ = 0;     // guarded by mutex_
  };

  std::shared_ptr<Shelf> shelf_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_BUFFER_POOL_H_
