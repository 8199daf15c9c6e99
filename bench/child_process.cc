#include "bench/child_process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/fail.h"

namespace layerd::bench {

std::string ProgramBeside(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").replace_filename(name).string();
}

ChildProcess::ChildProcess(const std::vector<std::string>& arguments, std::string log)
    : program_(arguments[0]), log_(std::move(log)) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const auto fail = [this] { Fail(absl::StrCat("cannot run ", program_, ": ", std::strerror(errno))); };
  if (access(program_.c_str(), X_OK) != 0) fail();
  // Closed in children that are started later: only the end of this process shall close them.
  int input[2], output[2];
  if (pipe2(input, O_CLOEXEC) != 0 || pipe2(output, O_CLOEXEC) != 0) fail();
  const int log_file = open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log_file < 0) fail();

  const pid_t parent = getpid();
  pid_ = fork();  // posix_spawn() cannot ask for the signal
  if (pid_ < 0) fail();
  if (pid_ == 0) {
    // System calls only: other threads may have held any lock.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // which has ended before it could be asked for
    dup2(input[0], STDIN_FILENO);
    dup2(output[1], STDOUT_FILENO);
    dup2(log_file, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(1);
  }
  close(input[0]);
  close(output[1]);
  close(log_file);
  input_ = input[1];
  output_ = output[0];
}

ChildProcess::~ChildProcess() {
  close(input_);
  waitpid(pid_, nullptr, 0);
  close(output_);
}

std::string ChildProcess::ReadAddress() {
  const std::string kSaid = "grpc ";
  std::string line;
  char c = 0;
  while (read(output_, &c, 1) == 1 && c != '\n') line += c;
  if (c == '\n' && line.rfind(kSaid, 0) == 0) return line.substr(kSaid.size());
  std::cerr << std::ifstream(log_).rdbuf();
  Fail(absl::StrCat(program_, " does not serve"));
}

}  // namespace layerd::bench
