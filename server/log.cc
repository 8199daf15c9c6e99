#include "server/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <map>
#include <memory>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace layerd {
namespace {

spdlog::logger& Logger() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = spdlog::stderr_logger_mt("layerd");
    made->set_pattern("ts=%Y-%m-%dT%H:%M:%S.%eZ level=%l event=%v", spdlog::pattern_time_type::utc);
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return *logger;
}

// As it is, or in double quotes where it has a character that would end or confuse the value.
std::string Quoted(std::string_view value) {
  const bool plain = !value.empty() && value.find_first_of(" \"=\\\n\r\t") == std::string_view::npos;
  if (plain) return std::string(value);
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return quoted + "\"";
}

}  // namespace

bool SetLogLevel(std::string_view level) {
  constexpr std::pair<std::string_view, spdlog::level::level_enum> kLevels[] = {{"debug", spdlog::level::debug},
                                                                                {"info", spdlog::level::info},
                                                                                {"warning", spdlog::level::warn},
                                                                                {"error", spdlog::level::err}};
  for (const auto& [name, value] : kLevels) {
    if (name == level) {
      Logger().set_level(value);
      return true;
    }
  }
  return false;
}

void LogSeldom(LogLevel level, std::string_view event, const std::string& subject, const std::string& text) {
  constexpr absl::Duration kPause = absl::Minutes(1);
  constexpr size_t kMaxRemembered = 10000;
  static std::mutex mutex;
  static std::map<std::string, absl::Time>* const last = new std::map<std::string, absl::Time>;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (last->size() >= kMaxRemembered) last->clear();
    const absl::Time now = absl::Now();
    absl::Time& before =
        last->try_emplace(absl::StrCat(std::string(event), "\n", subject, "\n", text), absl::InfinitePast())
            .first->second;
    if (now - before < kPause) return;
    before = now;
  }
  Log(level, event, {{"subject", subject}, {"error", text}});
}

void Log(LogLevel level, std::string_view event, LogFields fields) {
  constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                                   spdlog::level::err};
  const auto to = kLevels[static_cast<int>(level)];
  if (!Logger().should_log(to)) return;
  std::string line(event);
  for (const auto& [key, value] : fields) {
    line += ' ';
    line += key;
    line += '=';
    line += Quoted(value);
  }
  Logger().log(to, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace layerd
