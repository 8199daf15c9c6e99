// What preparing a layer takes of the heap, counted: a program of its own, since it counts every byte that is allocated.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "lib/resident/layer_library.h"
#include "tests/lib/resident/memory_catalog.h"

namespace {

std::atomic<int64_t> now_bytes = 0, peak_bytes = 0;

void* Counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  const auto now = now_bytes += static_cast<int64_t>(malloc_usable_size(memory));
  for (int64_t peak = peak_bytes; now > peak && !peak_bytes.compare_exchange_weak(peak, now);) {
  }
  return memory;
}

void Free(void* memory) {
  if (memory != nullptr) now_bytes -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

// The others that the standard library has call these; those of arrays, which AddressSanitizer has its own of, are here too.
void* operator new(size_t size) { return Counted(std::malloc(size == 0 ? 1 : size)); }
void* operator new(size_t size, std::align_val_t alignment) {
  const size_t step = static_cast<size_t>(alignment);
  return Counted(std::aligned_alloc(step, (size + step - 1) / step * step));
}
void* operator new[](size_t size) { return operator new(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept try {
  return operator new(size);
} catch (const std::bad_alloc&) {
  return nullptr;
}
void* operator new[](size_t size, std::align_val_t alignment) { return operator new(size, alignment); }
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete(void* memory, size_t) noexcept { Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory) noexcept { Free(memory); }
void operator delete[](void* memory, size_t) noexcept { Free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { Free(memory); }

namespace layerd {
namespace {

constexpr char kName[] = "models/m/layers/l";
constexpr int64_t kMiB = int64_t{1} << 20;

// Panels are mapped and no part of the heap: all that the heap may see are the pieces on their way.
TEST(PreparedMemory, IsThePanelsAndAPieceForEachThread) {
  MemoryCatalog catalog;
  const auto record = catalog.Put(kName, SeededSwiGluLayer(1, 1024, 3072));
  const int64_t weight_bytes = record->info().extent.weight_bytes;
  ASSERT_EQ(weight_bytes, 36 * kMiB);
  LayerLibrary library({&catalog}, {});
  const int64_t before = now_bytes;
  {
    peak_bytes = before;
    const auto layer = Acquire(library, kName);
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_EQ(library.stats().memory_bytes, weight_bytes);  // multiples of 64
    EXPECT_GE(peak_bytes - before, kPieceBytes);            // it does count
    EXPECT_LE(peak_bytes - before, 3 * kPieceBytes + kMiB / 2);
    EXPECT_LE(now_bytes - before, kMiB / 2);
  }
  catalog.Remove(kName);
  library.Preload();
  EXPECT_EQ(library.stats().memory_bytes, 0);
  EXPECT_LE(now_bytes - before, kMiB / 2);
}

}  // namespace
}  // namespace layerd
