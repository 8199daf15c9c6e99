// The vector instructions that a call executes, seen by stepping through it one instruction at a time: which kernel runs
// is observed, and not asked of the code that chooses it.
//
// x86-64 Linux only. Of the calling thread only; about a microsecond for each instruction.
#ifndef LAYERD_TESTS_LIB_KERNELS_EXECUTED_INSTRUCTIONS_H_
#define LAYERD_TESTS_LIB_KERNELS_EXECUTED_INSTRUCTIONS_H_

#if defined(__x86_64__) && defined(__linux__)

#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <set>

// The bounds of the program's own code, by the linker: libraries that are loaded are outside.
extern "C" const char __executable_start, etext;

namespace layerd {

struct ExecutedInstructions {
  int64_t count = 0;  // of all in the program's own code
  // Where in the program those are that work on vectors of so many bits.
  std::set<uintptr_t> on_256_bits;
  std::set<uintptr_t> on_512_bits;
};

namespace executed_instructions_internal {

// What the signal handler writes, which may not allocate.
struct Log {
  static constexpr int kMost = 4096;
  int64_t count;
  int vectors;                 // of all in the program, executed again and again
  uintptr_t addresses[kMost];  // the lowest bit: 512 bits; an instruction may be at any address, so shifted left by one
  bool overflow;
};
inline Log trace_log;

// 0, 256 or 512: the width of the vectors that the instruction works on, by its prefix (Intel SDM 2.3 and 2.7).
inline int VectorBits(const unsigned char* code) {
  switch (code[0]) {
    case 0x62: {  // EVEX
      const int length = code[3] >> 5 & 3;
      return length == 2 ? 512 : length == 1 ? 256 : 0;
    }
    case 0xC4:  // VEX of three bytes
      return (code[2] & 4) != 0 ? 256 : 0;
    case 0xC5:  // VEX of two
      return (code[1] & 4) != 0 ? 256 : 0;
    default:
      return 0;
  }
}

inline void OnStep(int, siginfo_t*, void* context) {
  const auto address = static_cast<uintptr_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
  if (address < reinterpret_cast<uintptr_t>(&__executable_start) || address >= reinterpret_cast<uintptr_t>(&etext)) {
    return;
  }
  ++trace_log.count;
  const int bits = VectorBits(reinterpret_cast<const unsigned char*>(address));
  if (bits == 0) return;
  const uintptr_t entry = address << 1 | static_cast<uintptr_t>(bits == 512);
  for (int i = trace_log.vectors; i-- > 0;) {
    if (trace_log.addresses[i] == entry) return;
  }
  if (trace_log.vectors == Log::kMost) {
    trace_log.overflow = true;
  } else {
    trace_log.addresses[trace_log.vectors++] = entry;
  }
}

// The processor's trap flag, in a thread of which the handler sees every instruction while it is set. The stack pointer
// moves past the red zone for as long as it is used.
inline __attribute__((always_inline)) void BeginSteps() {
  asm volatile("lea -128(%%rsp), %%rsp\n pushfq\n orq $0x100, (%%rsp)\n popfq\n lea 128(%%rsp), %%rsp" ::
                   : "memory", "cc");
}
inline __attribute__((always_inline)) void EndSteps() {
  asm volatile("lea -128(%%rsp), %%rsp\n pushfq\n andq $-0x101, (%%rsp)\n popfq\n lea 128(%%rsp), %%rsp" ::
                   : "memory", "cc");
}

}  // namespace executed_instructions_internal

template <class Body>
ExecutedInstructions Execute(const Body& body) {
  namespace internal = executed_instructions_internal;
  internal::trace_log = {};
  struct sigaction action = {}, before = {};
  action.sa_sigaction = internal::OnStep;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, &before);
  internal::BeginSteps();
  body();
  internal::EndSteps();
  sigaction(SIGTRAP, &before, nullptr);
  EXPECT_FALSE(internal::trace_log.overflow) << "more instructions than there is room for";
  ExecutedInstructions executed;
  executed.count = internal::trace_log.count;
  for (int i = 0; i < internal::trace_log.vectors; ++i) {
    const uintptr_t entry = internal::trace_log.addresses[i];
    ((entry & 1) != 0 ? executed.on_512_bits : executed.on_256_bits).insert(entry >> 1);
  }
  return executed;
}

}  // namespace layerd

#endif  // defined(__x86_64__) && defined(__linux__)

#endif  // LAYERD_TESTS_LIB_KERNELS_EXECUTED_INSTRUCTIONS_H_
