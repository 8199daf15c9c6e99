#include "lib/base/guarded_mapping.h"

#include <linux/magic.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

// A live mapping as the handler sees it, who may take no lock. `version` is odd while the slot changes, so that the end of
// one mapping is never taken for another's. The slot of a mapping that is being touched does not change.
struct Slot {
  std::atomic<uint64_t> version{0};
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};  // 0: the slot is free
  std::atomic<uintptr_t> page_bytes{0};
  std::atomic<bool> damaged{false};

  // Guarded by table_mutex.
  void Set(uintptr_t new_begin, uintptr_t new_end, uintptr_t new_page_bytes) {
    version.fetch_add(1);
    begin = new_begin;
    end = new_end;
    page_bytes = new_page_bytes;
    damaged = false;
    version.fetch_add(1);
  }
};

std::mutex table_mutex;
Slot table[GuardedMapping::kMostMappings];
std::atomic<int> slots_used{0};  // those behind were never used
struct sigaction former_action;

// Called by the handler: only atomics and one system call.
bool Repair(uintptr_t at) {
  const int used = slots_used.load();
  for (int i = 0; i < used; ++i) {
    Slot& slot = table[i];
    const uint64_t version = slot.version.load();
    const uintptr_t begin = slot.begin.load(), end = slot.end.load();
    if (version % 2 != 0 || slot.version.load() != version || at < begin || at >= end) continue;
    slot.damaged = true;
    const uintptr_t page_bytes = slot.page_bytes.load();
    const uintptr_t page = at / page_bytes * page_bytes;
    // Not mmap(), which sanitizers replace by one that is not for handlers.
    const long mapped = syscall(SYS_mmap, page, end - page, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0L);
    return mapped == static_cast<long>(page);
  }
  return false;
}

void OnBusError(int signal, siginfo_t* info, void* /*context*/) {
  const int saved_errno = errno;
  const bool by_an_access = info->si_code > 0;
  if (!by_an_access || !Repair(reinterpret_cast<uintptr_t>(info->si_addr))) {
    sigaction(signal, &former_action, nullptr);
    if (!by_an_access) raise(signal);  // an access comes again by itself
  }
  errno = saved_errno;
}

void InstallHandlerOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = OnBusError;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &former_action);
  });
}

// What a mapping of `fd` may be replaced by the piece in.
uintptr_t PageBytesOf(int fd) {
  struct statfs system;
  if (fstatfs(fd, &system) == 0 && system.f_type == HUGETLBFS_MAGIC) return static_cast<uintptr_t>(system.f_bsize);
  return static_cast<uintptr_t>(getpagesize());
}

// −1: none is free.
int TakeSlot(uintptr_t begin, uintptr_t end, uintptr_t page_bytes) {
  std::lock_guard<std::mutex> lock(table_mutex);
  for (int i = 0; i < GuardedMapping::kMostMappings; ++i) {
    if (table[i].end.load() != 0) continue;
    table[i].Set(begin, end, page_bytes);
    if (i >= slots_used.load()) slots_used.store(i + 1);
    return i;
  }
  return -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GuardedMapping>> GuardedMapping::Map(int fd, size_t size) {
  InstallHandlerOnce();
  void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return TooLarge(
        "", "NOT_MAPPED",
        absl::StrCat("a file of ", size, " bytes cannot be mapped: ", std::generic_category().message(errno)));
  }
  madvise(data, size, MADV_HUGEPAGE);  // where the system has them for shared memory
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const int slot = TakeSlot(begin, begin + size, PageBytesOf(fd));
  if (slot < 0) {
    munmap(data, size);
    return Overloaded(absl::StrCat("busy: ", kMostMappings, " files of shared memory are mapped"), 1000);
  }
  return std::unique_ptr<GuardedMapping>(new GuardedMapping(static_cast<std::byte*>(data), size, slot));
}

GuardedMapping::~GuardedMapping() {
  {
    std::lock_guard<std::mutex> lock(table_mutex);
    table[slot_].Set(0, 0, 0);
  }
  munmap(data_, size_);
}

bool GuardedMapping::damaged() const { return table[slot_].damaged.load(); }

}  // namespace layerd
