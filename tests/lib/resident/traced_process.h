// A child process that is stopped before each system call by which it changes files.
#ifndef LAYERD_TESTS_LIB_RESIDENT_TRACED_PROCESS_H_
#define LAYERD_TESTS_LIB_RESIDENT_TRACED_PROCESS_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/lib/resident/child_process.h"

namespace layerd {

class TracedProcess {
 public:
  // The child begins with the first call of Next().
  template <typename Work>
  explicit TracedProcess(Work work)
      : child_([&] {
          // Where nobody may trace, the parent sees the child end at once.
          if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0 || raise(SIGSTOP) != 0) _exit(kNoTracing);
          work();
        }) {
    int status = 0;
    waitpid(child_.id(), &status, 0);
    traced_ = WIFSTOPPED(status) &&
              ptrace(PTRACE_SETOPTIONS, child_.id(), nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) == 0;
  }

  bool is_traced() const { return traced_; }

  // Lets the child run until it is about to make the next such call, which is described: "rename a -> b", with paths as
  // they are. Nothing once the child has ended, which it must do well.
  std::optional<std::string> Next() {
    for (;;) {
      EXPECT_EQ(ptrace(PTRACE_SYSCALL, child_.id(), nullptr, nullptr), 0);
      int status = 0;
      if (waitpid(child_.id(), &status, 0) != child_.id() || !WIFSTOPPED(status)) {
        EXPECT_EQ(status, 0) << "the child failed";
        return std::nullopt;
      }
      if (WSTOPSIG(status) != (SIGTRAP | 0x80)) continue;
      __ptrace_syscall_info info = {};
      EXPECT_GT(ptrace(PTRACE_GET_SYSCALL_INFO, child_.id(), sizeof(info), &info), 0);
      if (info.op != PTRACE_SYSCALL_INFO_ENTRY) continue;
      std::string call = Describe(info.entry.nr, info.entry.args);
      if (!call.empty()) return call;
    }
  }

  void Kill() { child_.Kill(); }

#ifdef __x86_64__
  // Instead of the call that Next() gave, the child sees it fail with `error`.
  void FailCall(int error) {
    user_regs_struct registers = {};
    EXPECT_EQ(ptrace(PTRACE_GETREGS, child_.id(), nullptr, &registers), 0);
    registers.orig_rax = ~0ull;  // no call
    EXPECT_EQ(ptrace(PTRACE_SETREGS, child_.id(), nullptr, &registers), 0);
    EXPECT_EQ(ptrace(PTRACE_SYSCALL, child_.id(), nullptr, nullptr), 0);
    int status = 0;
    EXPECT_EQ(waitpid(child_.id(), &status, 0), child_.id());
    EXPECT_EQ(ptrace(PTRACE_GETREGS, child_.id(), nullptr, &registers), 0);
    registers.rax = static_cast<uint64_t>(-error);
    EXPECT_EQ(ptrace(PTRACE_SETREGS, child_.id(), nullptr, &registers), 0);
  }
#endif

 private:
  static constexpr int kNoTracing = 77;

  std::string Describe(uint64_t number, const uint64_t* args) const {
    switch (number) {
      case SYS_fsync:
      case SYS_fdatasync:
        return "sync " + Opened(args[0]);
      case SYS_write:
      case SYS_pwrite64:
        return "write " + Opened(args[0]);
      case SYS_ftruncate:
      case SYS_fallocate:
        return "allocate " + Opened(args[0]);
      case SYS_flock:
        return "lock " + Opened(args[0]);
      case SYS_utimensat:
        return "touch " + Opened(args[0]);
      case SYS_openat:
        return (args[2] & O_CREAT) != 0 ? "create " + Path(args[0], args[1]) : "";
      case SYS_mkdirat:
        return "mkdir " + Path(args[0], args[1]);
      case SYS_unlinkat:
        return (args[2] & AT_REMOVEDIR ? "rmdir " : "unlink ") + Path(args[0], args[1]);
#ifdef SYS_renameat
      case SYS_renameat:
#endif
      case SYS_renameat2:
        return "rename " + Path(args[0], args[1]) + " -> " + Path(args[2], args[3]);
      default:
        return "";
    }
  }

  std::string Opened(uint64_t descriptor) const {
    std::error_code ignored;
    return std::filesystem::read_symlink(absl::StrCat("/proc/", child_.id(), "/fd/", descriptor), ignored);
  }

  std::string Path(uint64_t folder, uint64_t address) const {
    std::string name;
    const int memory = open(absl::StrCat("/proc/", child_.id(), "/mem").c_str(), O_RDONLY | O_CLOEXEC);
    for (char c; pread(memory, &c, 1, static_cast<off_t>(address + name.size())) == 1 && c != '\0';) name += c;
    close(memory);
    return Opened(folder) + "/" + name;
  }

  ChildProcess child_;
  bool traced_ = false;
};

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_RESIDENT_TRACED_PROCESS_H_
