#include "server/flags.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <tuple>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lib/base/memory.h"
#include "lib/base/parallel.h"
#include "lib/weights/layer_name.h"
#include "server/log.h"

ABSL_FLAG(std::string, grpc_listen, "127.0.0.1:50051",
          "Addresses of the gRPC service, separated by commas: HOST:PORT (port 0: the system chooses) or unix:PATH.");
ABSL_FLAG(std::string, port_file, "", "File to write the chosen TCP ports to once serving, a line 'grpc PORT' each.");
ABSL_FLAG(double, grace_s, 30.0,
          "Seconds that calls in flight have to finish after SIGTERM or SIGINT, 0 to 3600; what is left is cancelled.");
ABSL_FLAG(
    int, max_message_mib, 64,
    "Largest request and largest answer, in MiB, 1 to 1023. Clients have a limit of their own, 4 MiB by default.");
ABSL_FLAG(int, message_memory_mib, 0,
          "Memory for messages, in MiB, 1 to 1000000: half for requests that arrive, wait or are computed (one and a "
          "quarter of "
          "the largest at least), half for answers. Calls beyond it wait, and when --queue_calls do, are refused. 0: a "
          "quarter of "
          "the memory that this process may use.");
ABSL_FLAG(
    double, stall_s, 60.0,
    "Seconds that a message may take on its way from or to a caller while others wait for its memory, 0.1 to 86400.");
ABSL_FLAG(int, threads, 0, "Computing threads, 1 to 1024; 0: as many as the CPUs this process may use.");
ABSL_FLAG(
    std::string, simd, "auto",
    "Instruction set of the kernels: auto, avx512, avx2 or scalar. Results have the same bits on each. With auto, "
    "products may also go through OpenBLAS.");
ABSL_FLAG(int, queue_calls, 256, "Calls that may wait for a thread, 1 to 1000000; more are refused.");
ABSL_FLAG(int, batch_rows, 128,
          "Rows of several calls for one layer that are computed together at most, 1 to 1000000; a call of more is "
          "divided, so that others get in between.");
ABSL_FLAG(int, batch_delay_us, 0,
          "Microseconds that a call for a layer on the server waits for others to be computed with though a thread is "
          "free, 0 to 1000000.");
ABSL_FLAG(
    double, max_verify_flops, 1e9,
    "Largest layer, in floating-point operations, that a call with verify set may have computed again in float64.");
ABSL_FLAG(
    std::string, models, "",
    "Folder of checkpoints: each folder in it with config.json and model.safetensors, or shards and their index, is "
    "a model whose layers are called by name. It is looked at every second.");
ABSL_FLAG(std::string, layer_store, "", "Folder for layers that callers upload. Several servers may share it.");
ABSL_FLAG(int64_t, layer_store_mib, 65536,
          "Most that uploaded layers may take in --layer_store, in MiB, 1 to 1000000000.");
ABSL_FLAG(double, upload_idle_s, 60.0, "Seconds after which an upload that sends nothing is ended, 0.1 to 86400.");
ABSL_FLAG(
    int64_t, layer_memory_mib, 0,
    "Memory for the weights of layers that are called by name, in MiB, 1 to 100000000; those not used for longest "
    "are read again when they are needed. 0: three eighths of the memory that this process may use.");
ABSL_FLAG(
    std::string, preload, "",
    "Layers that are read as soon as they are there, names separated by commas: models/{model}/layers/{layer}, with "
    "* for any number of characters. Others are read when they are first called.");
ABSL_FLAG(std::string, pin, "", "Layers that are read as soon as they are there, and stay in memory. As --preload.");
ABSL_FLAG(
    std::string, shared_memory_dir, "",
    "Folder, such as one of /dev/shm, whose files callers on this host may share with the daemon, so that tensors need "
    "not be sent. None: there is no shared memory.");
ABSL_FLAG(std::string, log_level, "info", "Least level that is logged: debug, info, warning or error.");

namespace layerd {
namespace {

constexpr std::string_view kFlagNames[] = {
    "grpc_listen", "port_file", "grace_s",          "max_message_mib", "message_memory_mib", "stall_s",
    "threads",     "simd",      "queue_calls",      "batch_rows",      "batch_delay_us",     "max_verify_flops",
    "log_level",   "models",    "layer_store",      "layer_store_mib", "upload_idle_s",      "layer_memory_mib",
    "preload",     "pin",       "shared_memory_dir"};

absl::Status OutOfRange(std::string_view flag, std::string_view expected, std::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", std::string(flag), ": expected ", std::string(expected), ", got ", std::string(got)));
}

template <typename T>
absl::Status CheckRange(std::string_view flag, T value, T lowest, T highest) {
  if (value >= lowest && value <= highest) return absl::OkStatus();
  return OutOfRange(flag, absl::StrCat(lowest, " to ", highest), absl::StrCat(value));
}

// Patterns of names, separated by commas. One that no name can fit is a mistake.
absl::StatusOr<std::vector<std::string>> ParsePatterns(std::string_view flag, const std::string& text) {
  std::vector<std::string> patterns = absl::StrSplit(text, ',', absl::SkipEmpty());
  for (const std::string& pattern : patterns) {
    std::string example = pattern;
    std::replace(example.begin(), example.end(), '*', 'x');
    // One that begins with * may fit anything.
    if (pattern.front() != '*' && !ParseLayerName(example)) {
      return OutOfRange(flag, "names such as models/m/layers/*.mlp", pattern);
    }
  }
  return patterns;
}

// Abseil's own help names the path of the source, and ends with status 1.
void PrintHelp() {
  std::puts(
      "layerd computes transformer layers, RMSNorm, LayerNorm and feed-forward, for callers over gRPC.\n"
      "Each flag may also be given as the environment variable LAYERD_<FLAG>, or in a file by --flagfile=FILE; the\n"
      "command line goes over the environment, the environment over the file.\n");
  for (const std::string_view name : kFlagNames) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(absl::string_view(name.data(), name.size()));
    std::printf("  --%s  (default: %s)\n      %s\n", std::string(name).c_str(),
                flag->DefaultValue().empty() ? "none" : flag->DefaultValue().c_str(), flag->Help().c_str());
  }
}

// Flag file, environment and command line as one command line, in that order: the last one to set a flag wins.
std::vector<std::string> AllArguments(int argc, char** argv) {
  std::vector<std::string> flag_files, rest;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.rfind("--flagfile=", 0) == 0 || argument.rfind("-flagfile=", 0) == 0) {
      flag_files.emplace_back(argument);
    } else if ((argument == "--flagfile" || argument == "-flagfile") && i + 1 < argc) {
      flag_files.push_back(absl::StrCat("--flagfile=", argv[++i]));
    } else {
      rest.emplace_back(argument);
    }
  }
  std::vector<std::string> all = {argv[0]};
  all.insert(all.end(), flag_files.begin(), flag_files.end());
  for (const std::string_view name : kFlagNames) {
    std::string variable = "LAYERD_";
    for (const char c : name) variable += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    // Empty is what a deployment leaves that sets nothing.
    const char* value = std::getenv(variable.c_str());
    if (value != nullptr && *value != '\0') all.push_back(absl::StrCat("--", std::string(name), "=", value));
  }
  all.insert(all.end(), rest.begin(), rest.end());
  return all;
}

}  // namespace

absl::StatusOr<Config> ParseFlags(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.rfind("--help", 0) == 0 || argument.rfind("-help", 0) == 0 || argument == "-h") {
      PrintHelp();
      std::exit(0);
    }
    if (argument == "--version" || argument == "-version") {
      std::puts("layerd " LAYERD_VERSION);
      std::exit(0);
    }
  }
  std::vector<std::string> arguments = AllArguments(argc, argv);
  std::vector<char*> pointers;
  pointers.reserve(arguments.size());
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  const auto positional = absl::ParseCommandLine(static_cast<int>(pointers.size()), pointers.data());
  if (positional.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("expected flags only, got the argument '", positional[1], "'"));
  }

  const int max_message_mib = absl::GetFlag(FLAGS_max_message_mib);
  const int message_memory_mib = absl::GetFlag(FLAGS_message_memory_mib);
  const int threads = absl::GetFlag(FLAGS_threads);
  const int queue_calls = absl::GetFlag(FLAGS_queue_calls);
  const int batch_rows = absl::GetFlag(FLAGS_batch_rows);
  const int batch_delay_us = absl::GetFlag(FLAGS_batch_delay_us);
  const int64_t layer_store_mib = absl::GetFlag(FLAGS_layer_store_mib);
  const int64_t layer_memory_mib = absl::GetFlag(FLAGS_layer_memory_mib);
  const double upload_idle_s = absl::GetFlag(FLAGS_upload_idle_s);
  const double stall_s = absl::GetFlag(FLAGS_stall_s);
  const double grace_s = absl::GetFlag(FLAGS_grace_s);
  const double max_verify_flops = absl::GetFlag(FLAGS_max_verify_flops);
  // 1023 MiB, so that twice the limit still is a legal message size (see server.cc).
  for (const auto& status :
       {CheckRange("max_message_mib", max_message_mib, 1, 1023),
        CheckRange("message_memory_mib", message_memory_mib, 0, 1000000), CheckRange("threads", threads, 0, 1024),
        CheckRange("queue_calls", queue_calls, 1, 1000000), CheckRange("batch_rows", batch_rows, 1, 1000000),
        CheckRange("batch_delay_us", batch_delay_us, 0, 1000000), CheckRange("grace_s", grace_s, 0.0, 3600.0),
        CheckRange("max_verify_flops", max_verify_flops, 0.0, 1e18), CheckRange("stall_s", stall_s, 0.1, 86400.0),
        CheckRange("upload_idle_s", upload_idle_s, 0.1, 86400.0),
        CheckRange("layer_store_mib", layer_store_mib, int64_t{1}, int64_t{1000000000}),
        layer_memory_mib == 0 ? absl::OkStatus()
                              : CheckRange("layer_memory_mib", layer_memory_mib, int64_t{1}, int64_t{100000000})}) {
    if (!status.ok()) return status;
  }
  if (!SetLogLevel(absl::GetFlag(FLAGS_log_level))) {
    return OutOfRange("log_level", "debug, info, warning or error", absl::GetFlag(FLAGS_log_level));
  }
  Config config;
  if (const std::string simd = absl::GetFlag(FLAGS_simd); simd != "auto") {
    config.simd = ParseSimd(simd);
    if (!config.simd) return OutOfRange("simd", "auto, avx512, avx2 or scalar", simd);
  }
  config.server.grpc_listen = absl::GetFlag(FLAGS_grpc_listen);
  config.server.layer_service.max_message_bytes = static_cast<int64_t>(max_message_mib) << 20;
  config.port_file = absl::GetFlag(FLAGS_port_file);
  config.grace = absl::Seconds(grace_s);
  config.threads = threads == 0 ? AvailableCpus() : threads;
  config.queue_calls = queue_calls;
  config.batch_rows = batch_rows;
  config.batch_delay = absl::Microseconds(batch_delay_us);
  const int64_t message_memory =
      message_memory_mib == 0 ? AvailableMemoryBytes() / 4 : static_cast<int64_t>(message_memory_mib) << 20;
  // Half for requests; at least so much that small ones can be computed while one of the largest size is received.
  config.server.admission.message_bytes =
      std::max(message_memory / 2, config.server.layer_service.max_message_bytes / 4 * 5);
  config.answer_bytes = message_memory / 2;
  config.server.admission.queue_calls = queue_calls;
  config.server.admission.stall = absl::Seconds(stall_s);
  config.server.layer_service.queue_calls = queue_calls;
  config.server.layer_service.decoding_threads = config.threads;
  config.server.layer_registry.max_message_bytes = config.server.layer_service.max_message_bytes;
  config.server.layer_registry.queue_calls = queue_calls;
  config.server.layer_registry.upload_idle = absl::Seconds(upload_idle_s);
  config.max_verify_flops = max_verify_flops;
  config.shared_memory_dir = absl::GetFlag(FLAGS_shared_memory_dir);
  config.layers.models = absl::GetFlag(FLAGS_models);
  config.layers.layer_store = absl::GetFlag(FLAGS_layer_store);
  config.layers.layer_store_bytes = layer_store_mib << 20;
  config.layers.library.memory_bytes = layer_memory_mib == 0 ? AvailableMemoryBytes() / 8 * 3 : layer_memory_mib << 20;
  for (const auto& [flag, text, patterns] :
       {std::tuple("preload", absl::GetFlag(FLAGS_preload), &config.layers.library.preloaded),
        std::tuple("pin", absl::GetFlag(FLAGS_pin), &config.layers.library.pinned)}) {
    auto parsed = ParsePatterns(flag, text);
    if (!parsed.ok()) return parsed.status();
    *patterns = *std::move(parsed);
  }
  if (const auto addresses = ParseListenAddresses(config.server.grpc_listen); !addresses.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--grpc_listen: ", addresses.status().message()));
  }
  return config;
}

}  // namespace layerd
