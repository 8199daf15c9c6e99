// How much memory this process may use.
#ifndef LAYERD_LIB_BASE_MEMORY_H_
#define LAYERD_LIB_BASE_MEMORY_H_

#include <cstdint>

namespace layerd {

// Bytes: the least of the machine's memory, the cgroup's limit (v2 and v1) and the limits on address space and data
// (RLIMIT_AS, RLIMIT_DATA). Threads: any.
int64_t AvailableMemoryBytes();

// Whether `bytes` more of address space can be had now.
bool CanReserve(int64_t bytes);

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_MEMORY_H_
