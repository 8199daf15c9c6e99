#include "bench/results.h"

#include <unistd.h>

#include <cmath>
#include <ctime>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lib/base/errors.h"
#include "lib/base/parallel.h"
#include "lib/kernels/simd.h"
#include "nlohmann/json.hpp"

namespace layerd::bench {
namespace {

using Json = nlohmann::ordered_json;

std::string FirstLineOf(const std::string& path, const std::string& prefix = "") {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, prefix.size(), prefix) == 0) return line.substr(prefix.size());
  }
  return "unknown";
}

std::string ProcessorName() {
  const auto value = [](const std::string& key) {
    const std::string rest = FirstLineOf("/proc/cpuinfo", key);
    const size_t colon = rest.find(": ");
    return colon == std::string::npos ? std::string("unknown") : rest.substr(colon + 2);
  };
  return absl::StrCat(value("model name"), ", family ", value("cpu family"), ", model ", value("model\t"));
}

std::string Date() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &utc);
  return text;
}

double MiB(int name) { return static_cast<double>(sysconf(name)) / (1 << 20); }

// JSON has no NaN and no infinity.
Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

double PerSecond(double amount, const Result& result) { return amount / result.paired.seconds * 1e-9; }

Json CellJson(const Result& result) {
  const CellName& name = result.name;
  Json cell;
  cell["name"] = name.Text();
  cell["kernel"] = name.kernel;
  cell["variant"] = name.variant;
  cell["dtype"] = name.dtype;
  cell["dim"] = name.dim;
  cell["hidden_dim"] = name.hidden_dim;
  cell["rows"] = name.rows;
  cell["threads"] = name.threads;
  cell["ratio"] = Number(result.paired.ratio);
  cell["goal"] = result.goal ? Json(*result.goal) : Json(nullptr);
  cell["bound"] = result.bound;
  cell["spread"] = Number(result.paired.spread);
  cell["attempts"] = result.paired.attempts;
  cell["seconds"] = result.paired.seconds;
  cell["bound_seconds"] = result.paired.other_seconds;
  cell["gflops"] = result.flops > 0 ? Json(PerSecond(result.flops, result)) : Json(nullptr);
  cell["gbs"] = PerSecond(result.bytes, result);
  cell["bytes"] = result.bytes;
  cell["fits_in"] = FitsIn(result.bytes, name.threads);
  cell["error"] = Number(result.error);
  if (result.other_error) cell["other_error"] = Number(*result.other_error);
  return cell;
}

}  // namespace

Description DescribeMachine() {
  return {
      {"processor", ProcessorName()},
      {"cpus", absl::StrCat(AvailableCpus())},
      {"caches",
       absl::StrFormat("L2 %.3g MiB a core, L3 %.3g MiB", MiB(_SC_LEVEL2_CACHE_SIZE), MiB(_SC_LEVEL3_CACHE_SIZE))},
      {"huge pages", FirstLineOf("/sys/kernel/mm/transparent_hugepage/enabled")},
      {"kernel", FirstLineOf("/proc/sys/kernel/osrelease")},
      {"compiler", absl::StrCat("gcc ", __VERSION__, ", ", LAYERD_BENCH_FLAGS)},
      {"simd", std::string(Name(ActiveSimd()))},
      {"date", Date()},
  };
}

std::string FitsIn(double bytes, int threads) {
  if (bytes <= static_cast<double>(sysconf(_SC_LEVEL1_DCACHE_SIZE)) * threads) return "L1";
  if (bytes <= static_cast<double>(sysconf(_SC_LEVEL2_CACHE_SIZE)) * threads) return "L2";
  return bytes <= static_cast<double>(sysconf(_SC_LEVEL3_CACHE_SIZE)) ? "L3" : "memory";
}

std::string Comments(const Description& machine) {
  std::string text;
  for (const auto& [key, value] : machine) absl::StrAppend(&text, "# ", key, ": ", value, "\n");
  return text;
}

std::string TableHead() {
  return absl::StrFormat("%-52s %12s %8s %7s %7s  %-18s %9s %8s %6s  %s\n", "cell", "time", "ratio", "goal", "spread",
                         "of", "GFLOP/s", "GB/s", "in", "error");
}

std::string TableLine(const Result& result) {
  const double us = result.paired.seconds * 1e6;
  return absl::StrFormat("%-52s %12s %8.3f %7s %7.2f  %-18s %9s %8.2f %6s  %.2g%s\n", result.name.Text(),
                         us < 1000 ? absl::StrFormat("%.2f us", us) : absl::StrFormat("%.3f ms", us / 1000),
                         result.paired.ratio, result.goal ? absl::StrFormat("%.2f", *result.goal) : "-",
                         result.paired.spread, result.bound,
                         result.flops > 0 ? absl::StrFormat("%.1f", PerSecond(result.flops, result)) : "-",
                         PerSecond(result.bytes, result), FitsIn(result.bytes, result.name.threads), result.error,
                         result.wrong ? " WRONG" : "");
}

absl::Status WriteJson(const std::string& path, const Description& machine, const std::vector<Result>& results) {
  Json json;
  json["machine"] = Json::object();
  for (const auto& [key, value] : machine) json["machine"][key] = value;
  json["cells"] = Json::array();
  for (const Result& result : results) json["cells"].push_back(CellJson(result));
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  file.close();
  if (!file) return InternalError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

}  // namespace layerd::bench
