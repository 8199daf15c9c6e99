// A place in memory for a tensor that is yet to be made.
#ifndef LAYERD_LIB_BASE_MEMORY_PLACE_H_
#define LAYERD_LIB_BASE_MEMORY_PLACE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace layerd {

struct MemoryPlace {
  std::shared_ptr<std::byte> data;  // aligned to the tensor's element
  int64_t bytes = 0;                // room from there on

  // What is left of it behind the first `skipped` bytes, of which it must have so many.
  MemoryPlace Behind(int64_t skipped) const {
    return {std::shared_ptr<std::byte>(data, data.get() + skipped), bytes - skipped};
  }
};

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_MEMORY_PLACE_H_
