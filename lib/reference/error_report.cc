#include "lib/reference/error_report.h"

#include <algorithm>

namespace layerd {

void Merge(const ErrorReport& more, ErrorReport& report) {
  report.max_abs_error = std::max(report.max_abs_error, more.max_abs_error);
  report.max_rel_error = std::max(report.max_rel_error, more.max_rel_error);
  report.max_ulp_error = std::max(report.max_ulp_error, more.max_ulp_error);
  report.within_contract = report.within_contract && more.within_contract;
  for (const StageReport& one : more.stages) {
    const auto same = std::find_if(report.stages.begin(), report.stages.end(),
                                   [&one](const StageReport& stage) { return stage.stage == one.stage; });
    if (same == report.stages.end()) {
      report.stages.push_back(one);
      continue;
    }
    same->max_abs_error = std::max(same->max_abs_error, one.max_abs_error);
    same->max_rel_error = std::max(same->max_rel_error, one.max_rel_error);
    same->max_ulp_error = std::max(same->max_ulp_error, one.max_ulp_error);
    same->max_error_over_bound = std::max(same->max_error_over_bound, one.max_error_over_bound);
  }
}

}  // namespace layerd
