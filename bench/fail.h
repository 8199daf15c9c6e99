// The end of a benchmark that cannot go on.
#ifndef LAYERD_BENCH_FAIL_H_
#define LAYERD_BENCH_FAIL_H_

#include <string>

#include "absl/status/status.h"

namespace layerd::bench {

// Prints `what` behind the program's name and ends the program by exit(1), so that static objects are destroyed. Threads:
// any; the first to come ends the program.
[[noreturn]] void Fail(const std::string& what);
[[noreturn]] void Fail(const absl::Status& status);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_FAIL_H_
