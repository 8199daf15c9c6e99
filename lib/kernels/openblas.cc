#include "lib/kernels/openblas.h"

#include <cblas.h>
#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "lib/base/memory.h"
#include "lib/base/parallel.h"

namespace layerd::openblas {
namespace {

constexpr char kLibrary[] = "libopenblas.so.0";
constexpr char kCoreVariable[] = "OPENBLAS_CORETYPE";
constexpr char kThreadsVariable[] = "OPENBLAS_NUM_THREADS";

constexpr int kMostCallers = 64;  // at once, on however many CPUs

decltype(&cblas_sgemm) sgemm = nullptr;

// Sets an environment variable and puts back what was there, so that child processes do not inherit our choice.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, /*overwrite=*/1);
  }
  ~ScopedVariable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

// The core type to ask for; empty where the library's own choice is good. What it would choose cannot be known before
// it is loaded, so this asks for what fits, whether or not it would have chosen the same.
std::string FittingCore() {
#if defined(__x86_64__)
  // gcc's test includes that the operating system saves the registers.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    return "SkylakeX";
  }
  if (__builtin_cpu_is("intel") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
#endif
  return "";
}

Library LoadOnce() {
  Library library;
  // It maps so much for each caller, and tries for ever where it cannot.
  constexpr int64_t kBufferBytes = int64_t{128} << 20;
  if (!CanReserve(kBufferBytes * (std::min(AvailableCpus(), kMostCallers) + 1))) {
    library.error = "too little address space for its buffers";
    return library;
  }
  std::optional<ScopedVariable> core, threads;
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) {
    const char* given = std::getenv(kCoreVariable);
    if (given != nullptr && *given != '\0') {
      library.requested = std::string(given) + " by " + kCoreVariable;
    } else {
      library.requested = FittingCore();
      if (!library.requested.empty()) core.emplace(kCoreVariable, library.requested.c_str());
    }
    threads.emplace(kThreadsVariable, "1");
    handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) {
    const char* error = dlerror();
    library.error = error != nullptr ? error : "dlopen failed";
    library.requested.clear();
    return library;
  }
  const auto get_config = reinterpret_cast<decltype(&openblas_get_config)>(dlsym(handle, "openblas_get_config"));
  const auto get_core = reinterpret_cast<decltype(&openblas_get_corename)>(dlsym(handle, "openblas_get_corename"));
  const auto set_threads =
      reinterpret_cast<decltype(&openblas_set_num_threads)>(dlsym(handle, "openblas_set_num_threads"));
  sgemm = reinterpret_cast<decltype(sgemm)>(dlsym(handle, "cblas_sgemm"));
  if (get_config == nullptr || get_core == nullptr || set_threads == nullptr || sgemm == nullptr) {
    library.error = std::string(kLibrary) + " lacks a function that is needed";
    return library;  // stays open: to unload a library that may have started threads is unsafe
  }
  library.version = get_config();
  library.core = get_core();
  set_threads(1);
  library.loaded = true;
  return library;
}

// At most as many callers at once as there are CPUs: more would gain nothing, each holds buffers of many MiB, and the
// table of these buffers is finite. (std::counting_semaphore of gcc 12 can lose a wake-up.)
class Gate {
 public:
  void Enter() {
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [&] { return inside_ < limit_; });
    ++inside_;
    ++calls_;
  }
  void Leave() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      --inside_;
    }
    left_.notify_one();
  }
  int64_t calls() {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable left_;
  const int limit_ = std::min(AvailableCpus(), kMostCallers);
  int inside_ = 0;
  int64_t calls_ = 0;
};

Gate& TheGate() {
  static Gate* gate = new Gate;  // never destroyed: threads may outlive main()
  return *gate;
}

}  // namespace

const Library& Load() {
  static const Library* library = new Library(LoadOnce());
  return *library;
}

void Sgemm(int64_t rows, int64_t cols, int64_t depth, const float* x, int64_t x_stride, const float* w,
           int64_t w_stride, bool w_transposed, bool accumulate, float* y, int64_t y_stride) {
  Gate& gate = TheGate();
  gate.Enter();
  // The first operand is always passed transposed: the library's small-matrix path, which sums in another order, takes
  // only those that are not.
  sgemm(CblasRowMajor, CblasTrans, w_transposed ? CblasTrans : CblasNoTrans, static_cast<blasint>(rows),
        static_cast<blasint>(cols), static_cast<blasint>(depth), 1.0f, x, static_cast<blasint>(x_stride), w,
        static_cast<blasint>(w_stride), accumulate ? 1.0f : 0.0f, y, static_cast<blasint>(y_stride));
  gate.Leave();
}

int64_t Calls() { return TheGate().calls(); }

}  // namespace layerd::openblas
