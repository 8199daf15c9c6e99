// A program that a benchmark runs beside itself.
#ifndef LAYERD_BENCH_CHILD_PROCESS_H_
#define LAYERD_BENCH_CHILD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace layerd::bench {

// The path of a program that was built with this one.
std::string ProgramBeside(const std::string& name);

// The process is in a group of its own, so that a terminal's Ctrl-C is not meant for it. However this process ends, it
// gets SIGKILL then, unless it asked for something else. Threads: one at a time; the one that makes it must live on, since
// its end counts as the end of the process.
class ChildProcess {
 public:
  // Starts the program arguments[0]. Its standard error is appended to the file `log`. Ends this program with a message
  // where it cannot be run.
  ChildProcess(const std::vector<std::string>& arguments, std::string log);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  // Closes its standard input and waits until it ends.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // The next address that it listens on, of each of which it prints a line "grpc ADDRESS". Where it ends before, this
  // program ends with its log.
  std::string ReadAddress();

 private:
  const std::string program_, log_;
  int input_ = -1, output_ = -1;  // our ends of the pipes
  pid_t pid_ = -1;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_CHILD_PROCESS_H_
