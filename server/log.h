// Structured logs on standard error, one line an event: time, level, event, then key=value pairs, quoted where needed.
//
//   ts=2026-01-31T12:00:00.000Z level=info event=listening address=127.0.0.1:50051
//
// Threads: any.
#ifndef LAYERD_SERVER_LOG_H_
#define LAYERD_SERVER_LOG_H_

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace layerd {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
using LogFields = std::initializer_list<std::pair<std::string_view, std::string>>;

// False, and no change, unless `level` is debug, info, warning or error.
bool SetLogLevel(std::string_view level);

// As Log(), but the same event of the same `subject` with the same `text` only once a minute: for what callers can bring
// about again and again.
void LogSeldom(LogLevel level, std::string_view event, const std::string& subject, const std::string& text);

void Log(LogLevel level, std::string_view event, LogFields fields = {});

}  // namespace layerd

#endif  // LAYERD_SERVER_LOG_H_
