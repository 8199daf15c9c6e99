// Child processes for tests, and pipes to them. To be used before the test starts threads.
#ifndef LAYERD_TESTS_LIB_RESIDENT_CHILD_PROCESS_H_
#define LAYERD_TESTS_LIB_RESIDENT_CHILD_PROCESS_H_

#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace layerd {

// Bytes from one process to another.
class Pipe {
 public:
  Pipe() { EXPECT_EQ(pipe(ends_), 0); }
  ~Pipe() {
    CloseReader();
    CloseWriter();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  void Send(char c) { EXPECT_EQ(write(ends_[1], &c, 1), 1); }
  // 0 once nobody can write any more.
  char Receive() {
    char c = 0;
    ssize_t got;
    do {
      got = read(ends_[0], &c, 1);
    } while (got < 0 && errno == EINTR);
    return got == 1 ? c : '\0';
  }
  void CloseReader() { Close(ends_[0]); }
  void CloseWriter() { Close(ends_[1]); }
  int writer() const { return ends_[1]; }

 private:
  static void Close(int& end) {
    if (end >= 0) close(end);
    end = -1;
  }
  int ends_[2] = {-1, -1};
};

// A process that runs `work` and ends, with status 0 where no expectation has failed in it.
class ChildProcess {
 public:
  template <typename Work>
  explicit ChildProcess(Work work) : id_(fork()) {
    if (id_ != 0) return;
    work();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  ~ChildProcess() {
    if (id_ > 0) Kill();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t id() const { return id_; }
  void Kill() {
    kill(id_, SIGKILL);
    (void)Wait();
  }
  // The status of waitpid().
  int Wait() {
    int status = -1;
    while (waitpid(id_, &status, 0) < 0 && errno == EINTR) {
    }
    id_ = -1;
    return status;
  }
  void ExpectSuccess() { EXPECT_EQ(Wait(), 0) << "a child process failed"; }

 private:
  pid_t id_;
};

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_RESIDENT_CHILD_PROCESS_H_
