#include "lib/base/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace layerd {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

std::align_val_t AlignmentOf(size_t bytes) { return std::align_val_t{bytes < 2 * kHugePage ? kCacheLine : kHugePage}; }

std::byte* AllocateFresh(size_t bytes) {
  const std::align_val_t alignment = AlignmentOf(bytes);
  void* memory = ::operator new(bytes, alignment);
  // But for the last part, which is in ordinary pages: not to be rounded up to a huge one.
  if (alignment == std::align_val_t{kHugePage}) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

}  // namespace

BufferPool& BufferPool::OfProcess() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr size_t kMostKept = 0;  // so that a use after the last copy is seen
#else
  constexpr size_t kMostKept = size_t{128} << 20;
#endif
  static auto* const pool = new BufferPool(kMostKept);  // never destroyed: tensors may outlive main()
  return *pool;
}

void BufferPool::Shelf::Free(Buffer buffer) { ::operator delete(buffer.data, AlignmentOf(buffer.bytes)); }

BufferPool::Shelf::~Shelf() {
  for (const Buffer& buffer : free_) Free(buffer);
}

BufferPool::Buffer BufferPool::Shelf::Take(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t most = bytes + bytes / 8;
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->bytes < bytes || it->bytes > most) continue;
    // Of equals the last to come, which is the likeliest to be in a cache.
    if (best == free_.end() || it->bytes <= best->bytes) best = it;
  }
  if (best == free_.end()) return {nullptr, 0};
  const Buffer buffer = *best;
  free_.erase(best);
  kept_bytes_ -= buffer.bytes;
  return buffer;
}

void BufferPool::Shelf::Put(Buffer buffer) {
  std::vector<Buffer> too_many;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(buffer);
    kept_bytes_ += buffer.bytes;
    // What has lain there longest goes first.
    size_t count = 0;
    while (kept_bytes_ > most_kept_bytes_) kept_bytes_ -= free_[count++].bytes;
    const auto end = free_.begin() + static_cast<std::ptrdiff_t>(count);
    too_many.assign(free_.begin(), end);
    free_.erase(free_.begin(), end);
  }
  for (const Buffer& old : too_many) Free(old);
}

size_t BufferPool::Shelf::kept_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return kept_bytes_;
}

std::shared_ptr<std::byte> BufferPool::Get(size_t bytes) {
  Buffer buffer = shelf_->Take(bytes);
  if (buffer.data == nullptr) buffer = {AllocateFresh(bytes), bytes};
  return {buffer.data, [shelf = shelf_, buffer](std::byte* /*data*/) { shelf->Put(buffer); }};
}

size_t BufferPool::kept_bytes() const { return shelf_->kept_bytes(); }

}  // namespace layerd
