#include "bench/fail.h"

#include <errno.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace layerd::bench {

void Fail(const std::string& what) {
  // Never unlocked: the program's end is seen by other threads as errors of their own, which are no news, and exit() may
  // be called only once.
  static std::mutex first;
  first.lock();
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what.c_str());
  std::exit(1);
}

void Fail(const absl::Status& status) { Fail(status.ToString()); }

}  // namespace layerd::bench
