// The threads that a benchmark runs on.
#ifndef LAYERD_BENCH_THREADS_H_
#define LAYERD_BENCH_THREADS_H_

#include "absl/functional/function_ref.h"
#include "lib/base/parallel.h"

namespace layerd::bench {

// Calls body(part) for part 0 … arena.threads() − 1, each on a thread of the arena of its own, all at once; the seconds
// from when the last of them was there until the last was done. Ends the program with a message where they do not all
// come within a minute.
double OnAllThreads(const Arena& arena, absl::FunctionRef<void(int part)> body);

// Binds the calling thread to the first CPU that the process began with and the other threads of the process, in order,
// to the CPUs after it: two threads left to themselves are at times both put on one CPU. Threads that are started later
// begin on their parent's CPU, so call it once everything has run.
void PinThreads();
// Lets the calling thread run on all those CPUs again, and with it the threads that it starts.
void UnpinThread();

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_THREADS_H_
