// layerd: the daemon.
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "lib/base/byte_budget.h"
#include "lib/base/parallel.h"
#include "lib/base/shared_regions.h"
#include "lib/engine/admission_engine.h"
#include "lib/engine/batching_engine.h"
#include "lib/engine/cpu_engine.h"
#include "lib/engine/resident_engine.h"
#include "lib/kernels/matmul.h"
#include "lib/kernels/simd.h"
#include "server/flags.h"
#include "server/log.h"
#include "server/resident_layers.h"
#include "server/server.h"

namespace layerd {
namespace {

// What a computation that outlasts the grace period has left to notice that it was cancelled before the process ends.
constexpr std::chrono::seconds kAbandonAfter{2};

// Multiply-adds up to which a call is computed by the thread that brings it: some 200 µs or less, where waking another
// takes a good part of that.
constexpr double kAtOnceWork = 1 << 23;

// Keeps some memory that gRPC has given back: by default the C library gives it to the system at each call of 1 MiB, and
// the system clears it again for the next, which costs a fifth of such a call. And it has few heaps, where by default each
// thread has its own: what one has received is free in its heap alone, so that they grow to many times what is in use.
void KeepFreedMemory() {
  mallopt(M_TRIM_THRESHOLD, 8 << 20);
  mallopt(M_MMAP_THRESHOLD, 4 << 20);  // which the other would else leave at 128 KiB
  constexpr int kCpusPerHeap = 4;
  mallopt(M_ARENA_MAX, (AvailableCpus() + kCpusPerHeap - 1) / kCpusPerHeap);
}

int Fail(absl::string_view message) {
  std::fprintf(stderr, "layerd: %.*s\n", static_cast<int>(message.size()), message.data());
  return 1;
}

sigset_t BlockStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

// Looked at before anything is started: a device or a pipe must not be renamed over.
absl::Status CheckPortFile(const std::string& path) {
  struct stat existing;
  if (lstat(path.c_str(), &existing) == 0 && !S_ISREG(existing.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--port_file: expected a regular file or a new name, got ", path));
  }
  return absl::OkStatus();
}

absl::Status WritePortFile(const std::string& path, const std::vector<int>& ports) {
  // Written beside and renamed, so that whoever waits for it never reads half of it.
  const std::string partial = absl::StrCat(path, ".", getpid(), ".partial");
  std::ofstream file(partial);
  for (const int port : ports) file << "grpc " << port << "\n";
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0) {
    std::remove(partial.c_str());
    return absl::FailedPreconditionError(absl::StrCat("--port_file: cannot write ", path));
  }
  return absl::OkStatus();
}

// Every file of a checkpoint is kept open, and every connection is one too; the soft limit is often 1024 for old programs'
// sake.
void AllowManyFiles() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Whether so many threads can run beside those that run now.
bool CanStartThreads(int count) {
  std::mutex hold;
  std::vector<std::thread> threads;
  bool all = true;
  {
    std::lock_guard<std::mutex> lock(hold);
    try {
      for (int i = 0; i < count; ++i) threads.emplace_back([&] { std::lock_guard<std::mutex> wait(hold); });
    } catch (const std::system_error&) {
      all = false;
    }
  }
  for (std::thread& thread : threads) thread.join();
  return all;
}

// `wanted`: whether OpenBLAS was to be used at all.
void LogMatMul(const MatMulReport& report, bool wanted) {
  if (!report.openblas_version.empty()) {
    Log(LogLevel::kInfo, "openblas",
        {{"version", report.openblas_version},
         {"core", report.openblas_core},
         {"core_asked_for", report.openblas_requested.empty() ? "none" : report.openblas_requested},
         {"follows_order", report.follows_order ? "yes" : "no"},
         {"used", report.used ? "yes" : "no"}});
  }
  if (!wanted) {
    Log(LogLevel::kInfo, "openblas_not_used", {{"reason", "--simd asks for kernels of our own"}});
  } else if (!report.used) {
    Log(LogLevel::kWarning, "openblas_not_used", {{"reason", report.reason}});
  }
}

int Run(int argc, char** argv) {
  // gRPC's locks are Abseil's. Some builds of it look for cycles at each of them, and end the process where one might be.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  KeepFreedMemory();
  const auto config = ParseFlags(argc, argv);
  if (!config.ok()) return Fail(config.status().message());
  if (auto status = CheckPortFile(config->port_file); !status.ok()) return Fail(status.message());
  // Before any thread is made, so that all inherit it and only sigwait() below sees the signals.
  const sigset_t stop_signals = BlockStopSignals();
  signal(SIGPIPE, SIG_IGN);
  AllowManyFiles();

  if (config->simd && !SetSimd(*config->simd)) {
    return Fail(absl::StrCat("--simd: this CPU does not have ", std::string(Name(*config->simd))));
  }
  const auto matmul = InitMatMul(/*allow_openblas=*/!config->simd);
  if (!matmul.ok()) return Fail(absl::StrCat("refusing to serve: ", matmul.status().message()));
  CpuEngineOptions engine_options;
  engine_options.threads = config->threads;
  engine_options.queue_calls = config->queue_calls;
  engine_options.max_answer_bytes = config->server.layer_service.max_message_bytes;
  engine_options.max_verify_flops = config->max_verify_flops;
  engine_options.at_once_work = kAtOnceWork;
  auto engine = std::make_unique<CpuEngine>(engine_options);
  // gRPC ends the process where it cannot start one of its threads.
  const int grpc_threads = 16 + 2 * AvailableCpus();
  if (engine->workers() == 0 || !CanStartThreads(grpc_threads)) {
    return Fail(absl::StrCat("cannot start ", config->threads, " computing threads and ", grpc_threads,
                             " of gRPC's: the limit on processes or on memory is too low"));
  }
  BatchingEngineOptions batching_options;
  batching_options.workers = engine->workers();
  batching_options.queue_calls = config->queue_calls;
  batching_options.batch_delay = config->batch_delay;
  batching_options.sizes.batch_rows = config->batch_rows;
  batching_options.sizes.limits = {engine_options.max_answer_bytes, engine_options.max_verify_flops};
  BatchingEngine batching(batching_options, *engine);
  auto layers = ResidentLayers::Open(config->layers);
  if (!layers.ok()) return Fail(layers.status().message());
  const auto answers = std::make_shared<ByteBudget>(config->answer_bytes, 0, "--message_memory_mib");
  AdmissionEngine admission({engine->workers(), batching_options.sizes.limits}, answers, batching);
  ResidentEngine resident((*layers)->source(), admission);
  ServerOptions server_options = config->server;
  server_options.admission.answers = answers;
  std::unique_ptr<SharedRegions> shared_memory;
  if (!config->shared_memory_dir.empty()) {
    auto opened = SharedRegions::Open(config->shared_memory_dir);
    if (!opened.ok()) return Fail(absl::StrCat("--shared_memory_dir: ", opened.status().message()));
    shared_memory = *std::move(opened);
    server_options.shared_memory = shared_memory.get();
  }
  auto server = Server::Start(server_options, resident, (*layers)->registry());
  if (!server.ok()) return Fail(server.status().message());
  LogMatMul(*matmul, /*wanted=*/!config->simd);
  if (engine->workers() < config->threads) {
    Log(LogLevel::kWarning, "fewer_threads",
        {{"asked", absl::StrCat(config->threads)}, {"started", absl::StrCat(engine->workers())}});
  }
  for (const std::string& address : (*server)->addresses()) {
    Log(LogLevel::kInfo, "listening",
        {{"address", address},
         {"threads", absl::StrCat(engine->workers())},
         {"simd", std::string(Name(ActiveSimd()))},
         {"version", LAYERD_VERSION}});
    std::printf("grpc %s\n", address.c_str());
  }
  std::fflush(stdout);
  (*layers)->WhenReady([&server = **server] { server.SetReady(); });
  if (!config->port_file.empty()) {
    if (auto status = WritePortFile(config->port_file, (*server)->ports()); !status.ok()) return Fail(status.message());
  }

  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  // A second signal ends the process at once.
  pthread_sigmask(SIG_UNBLOCK, &stop_signals, nullptr);
  Log(LogLevel::kInfo, "draining",
      {{"signal", signal_number == SIGTERM ? "SIGTERM" : "SIGINT"}, {"grace", absl::FormatDuration(config->grace)}});

  auto drained = std::async(std::launch::async, [&] { return (*server)->Drain(config->grace); });
  if (drained.wait_for(absl::ToChronoNanoseconds(config->grace) + kAbandonAfter) != std::future_status::ready) {
    // A computation that was under way does not end by being cancelled; its caller has been told already.
    Log(LogLevel::kWarning, "stopped", {{"abandoned", "a computation that outlasted the grace period"}});
  } else if (const int64_t unfinished = drained.get(); unfinished > 0) {
    Log(LogLevel::kWarning, "stopped", {{"cancelled_calls", absl::StrCat(unfinished)}});
  } else {
    Log(LogLevel::kInfo, "stopped");
  }
  // Every answer is sent and every connection closed. The rest is memory, and gRPC's own shutdown, which may wait 10 s
  // for a poller that it started for a large write.
  std::fflush(nullptr);
  std::_Exit(0);
}

}  // namespace
}  // namespace layerd

int main(int argc, char** argv) { return layerd::Run(argc, argv); }
