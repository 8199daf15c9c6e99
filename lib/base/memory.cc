#include "lib/base/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace layerd {
namespace {

// A file that holds one number; `otherwise` where it is absent or says "max".
int64_t ReadNumber(const char* path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t number;
  return file >> number ? number : otherwise;
}

int64_t Limit(__rlimit_resource resource, int64_t otherwise) {
  rlimit limit;
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return otherwise;
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, static_cast<rlim_t>(otherwise)));
}

}  // namespace

int64_t AvailableMemoryBytes() {
  int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    bytes = std::min(bytes, ReadNumber(path, bytes));
  }
  return std::min({bytes, Limit(RLIMIT_AS, bytes), Limit(RLIMIT_DATA, bytes)});
}

bool CanReserve(int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  munmap(memory, static_cast<size_t>(bytes));
  return true;
}

}  // namespace layerd
