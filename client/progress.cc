#include "client/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace layerd {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(1);  // what is shorter needs no bar
constexpr absl::Duration kInterval = absl::Milliseconds(100);
constexpr int kMinBar = 10, kMaxBar = 30, kMinName = 8;

int Columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string BytesText(double bytes) {
  if (bytes < 1024) return absl::StrFormat("%.0f B", bytes);
  const char* const kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  bytes /= 1024;
  // 1023.95 would be printed as 1024.0.
  for (; bytes >= 1023.95 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  return absl::StrFormat("%.1f %s", bytes, kUnits[unit]);
}

std::string TimeText(absl::Duration duration) {
  if (duration < absl::ZeroDuration() || duration > absl::Hours(1000)) return "-:--";
  const int64_t seconds = absl::ToInt64Seconds(duration + absl::Milliseconds(500));
  const int64_t minutes = seconds / 60;
  if (minutes < 60) return absl::StrFormat("%d:%02d", minutes, seconds % 60);
  return absl::StrFormat("%d:%02d:%02d", minutes / 60, minutes % 60, seconds % 60);
}

std::string ProgressLine(std::string_view name, int64_t done_bytes, int64_t total_bytes, absl::Duration elapsed,
                         int columns) {
  const double done = static_cast<double>(done_bytes), total = static_cast<double>(total_bytes);
  const double part = total_bytes > 0 ? std::clamp(done / total, 0.0, 1.0) : 1;
  const double seconds = absl::ToDoubleSeconds(elapsed);
  const double rate = seconds > 0 ? done / seconds : 0;
  const absl::Duration left = rate > 0 ? absl::Seconds((total - done) / rate) : absl::InfiniteDuration();
  // Rounded down: 100% is when all has passed.
  const std::string figures = absl::StrFormat("%3d%%  %s of %s  %s/s  %s left", static_cast<int>(part * 100),
                                              BytesText(done), BytesText(total), BytesText(rate), TimeText(left));
  const int room = columns - static_cast<int>(figures.size());
  const auto name_room = static_cast<size_t>(std::max(room / 2, kMinName));
  const size_t name_columns = std::min(name.size(), name_room);
  // The end of a layer's name says more than its beginning.
  std::string line = name.size() <= name_room
                         ? absl::StrCat(std::string(name), " ")
                         : absl::StrCat("…", std::string(name.substr(name.size() - name_room + 1)), " ");
  const int bar = std::min(room - static_cast<int>(name_columns) - 4, kMaxBar);  // beside brackets and spaces
  if (bar >= kMinBar) {
    const int full = static_cast<int>(part * bar);
    absl::StrAppend(&line, "[", std::string(full, '#'), std::string(bar - full, '-'), "] ");
  }
  return line + figures;
}

ProgressBar::ProgressBar(std::string name, bool always)
    : name_(std::move(name)), always_(always), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_ == absl::InfinitePast()) return;
  std::fputs(always_ ? "\n" : "\r\x1b[K", stderr);
}

void ProgressBar::Update(int64_t done_bytes, int64_t total_bytes) {
  if (!always_ && !terminal_) return;
  const absl::Time now = absl::Now();
  if (start_ == absl::InfinitePast()) start_ = now;
  const bool complete = done_bytes == total_bytes;
  if (always_ ? now - drawn_ < kInterval && !complete : now - start_ < kPatience || now - drawn_ < kInterval) return;
  drawn_ = now;
  const std::string line = ProgressLine(name_, done_bytes, total_bytes, now - start_, Columns() - 1);
  // On a terminal, what a longer line has left behind is wiped.
  std::fprintf(stderr, terminal_ ? "\r%s\x1b[K" : "\r%s", line.c_str());
  std::fflush(stderr);
}

}  // namespace layerd
