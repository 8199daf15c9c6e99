// How far an upload or a download is, on standard error, for people who wait.
//
// Threads: the functions are pure; a ProgressBar belongs to one thread.
#ifndef LAYERD_CLIENT_PROGRESS_H_
#define LAYERD_CLIENT_PROGRESS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/time/time.h"

namespace layerd {

// "0 B", "1023 B", "1.0 KiB", "541.1 MiB": with one decimal, in the unit in which it is below 1024.
std::string BytesText(double bytes);

// Rounded to seconds: "0:07", "12:34", "1:02:03"; "-:--" for what is not known, or no sane time.
std::string TimeText(absl::Duration duration);

// "NAME [####----]  42%  227.3 MiB of 541.1 MiB  312.4 MiB/s  0:01 left", in at most `columns` characters as far as
// NAME, which is shortened, and the bar, which is left out where it would be tiny, allow.
std::string ProgressLine(std::string_view name, int64_t done_bytes, int64_t total_bytes, absl::Duration elapsed,
                         int columns);

// Draws the line again and again. Unless `always`, only on a terminal, and only from a second on; it is wiped in the end.
class ProgressBar {
 public:
  ProgressBar(std::string name, bool always);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // The first call starts the clock.
  void Update(int64_t done_bytes, int64_t total_bytes);

 private:
  const std::string name_;
  const bool always_;
  const bool terminal_;
  absl::Time start_ = absl::InfinitePast();
  absl::Time drawn_ = absl::InfinitePast();  // when it was last drawn
};

}  // namespace layerd

#endif  // LAYERD_CLIENT_PROGRESS_H_
