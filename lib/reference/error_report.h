// How far a result is from the float64 reference (docs/numerics.md, N7). Plain data; threads: pure
// functions.
#ifndef LAYERD_LIB_REFERENCE_ERROR_REPORT_H_
#define LAYERD_LIB_REFERENCE_ERROR_REPORT_H_

#include <string>
#include <vector>

namespace layerd {

// Greatest errors over the elements of one stage. Where exact and got are both NaN, or the same infinity, the error is
// 0; where only one of them is, it is infinite.
struct StageReport {
  std::string stage;
  double max_abs_error = 0;
  double max_rel_error = 0;
  double max_ulp_error = 0;         // in ulps of the exact value, in the stage's dtype
  double max_error_over_bound = 0;  // at most 1 within the contract
};

struct ErrorReport {
  // The output against the whole layer in float64.
  double max_abs_error = 0;
  double max_rel_error = 0;
  double max_ulp_error = 0;
  // Every stage within its bound.
  bool within_contract = true;
  std::vector<StageReport> stages;
};

// Makes of the report on some rows the one on those and the rows of `more`, of the same layer: what a report on all of them
// at once says, since every error is the greatest over rows.
void Merge(const ErrorReport& more, ErrorReport& report);

}  // namespace layerd

#endif  // LAYERD_LIB_REFERENCE_ERROR_REPORT_H_
