#include "lib/base/guarded_mapping.h"

#include <linux/magic.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
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
size_t mapped_bytes = 0;         // guarded by table_mutex
std::atomic<int> slots_used{0};  // those behind were never used
struct sigaction former_action;
int stand_in_fd = -1;  // the memory that stands for what is missing

constexpr uintptr_t kStandInBytes = uintptr_t{64} << 20;

// Puts the stand-in over [begin, end), as often as it takes.
bool StandIn(uintptr_t begin, uintptr_t end) {
  for (uintptr_t at = begin; at < end; at += kStandInBytes) {
    // Not mmap(), which sanitizers replace by one that is not for handlers.
    const long mapped = syscall(SYS_mmap, at, std::min(end - at, kStandInBytes), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_FIXED, stand_in_fd, 0L);
    if (mapped != static_cast<long>(at)) return false;
  }
  return true;
}

// Called by the handler: only atomics and system calls.
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
    return StandIn(page, end);
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

// False where there is no memory for the stand-in.
bool InstallHandlerOnce() {
  static const bool installed = [] {
    stand_in_fd = memfd_create("layerd_stand_in", MFD_CLOEXEC);
    if (stand_in_fd < 0 || ftruncate(stand_in_fd, kStandInBytes) != 0) return false;
    struct sigaction action = {};
    action.sa_sigaction = OnBusError;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &former_action) == 0;
  }();
  return installed;
}

// What a mapping of `fd` may be replaced by the piece in.
uintptr_t PageBytesOf(int fd) {
  struct statfs system;
  if (fstatfs(fd, &system) == 0 && system.f_type == HUGETLBFS_MAGIC) return static_cast<uintptr_t>(system.f_bsize);
  return static_cast<uintptr_t>(getpagesize());
}

// −1: none is free, or too much is mapped.
int TakeSlot(uintptr_t begin, uintptr_t end, uintptr_t page_bytes) {
  std::lock_guard<std::mutex> lock(table_mutex);
  if (end - begin > GuardedMapping::kMostBytes - mapped_bytes) return -1;
  for (int i = 0; i < GuardedMapping::kMostMappings; ++i) {
    if (table[i].end.load() != 0) continue;
    table[i].Set(begin, end, page_bytes);
    mapped_bytes += end - begin;
    if (i >= slots_used.load()) slots_used.store(i + 1);
    return i;
  }
  return -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GuardedMapping>> GuardedMapping::Map(int fd, size_t size) {
  if (!InstallHandlerOnce()) return InternalError("no handler for files that are truncated can be installed");
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
    return Overloaded(absl::StrCat("busy: no more than ", kMostMappings, " files of shared memory, and ", kMostBytes,
                                   " bytes of them, are mapped at a time"),
                      1000);
  }
  return std::unique_ptr<GuardedMapping>(new GuardedMapping(static_cast<std::byte*>(data), size, slot));
}

GuardedMapping::~GuardedMapping() {
  {
    std::lock_guard<std::mutex> lock(table_mutex);
    table[slot_].Set(0, 0, 0);
    mapped_bytes -= size_;
  }
  munmap(data_, size_);
}

bool GuardedMapping::damaged() const { return table[slot_].damaged.load(); }

}  // namespace layerd
