#include "wire/report_codec.h"

namespace layerd::wire {

void EncodeReport(const ErrorReport& report, v1::ErrorReport& message) {
  message.set_max_abs_error(report.max_abs_error);
  message.set_max_rel_error(report.max_rel_error);
  message.set_max_ulp_error(report.max_ulp_error);
  message.set_within_contract(report.within_contract);
  for (const StageReport& stage : report.stages) {
    auto* to = message.add_stages();
    to->set_stage(stage.stage);
    to->set_max_abs_error(stage.max_abs_error);
    to->set_max_rel_error(stage.max_rel_error);
    to->set_max_ulp_error(stage.max_ulp_error);
    to->set_max_error_over_bound(stage.max_error_over_bound);
  }
}

ErrorReport DecodeReport(const v1::ErrorReport& message) {
  ErrorReport report{
      message.max_abs_error(), message.max_rel_error(), message.max_ulp_error(), message.within_contract(), {}};
  for (const auto& stage : message.stages()) {
    report.stages.push_back({stage.stage(), stage.max_abs_error(), stage.max_rel_error(), stage.max_ulp_error(),
                             stage.max_error_over_bound()});
  }
  return report;
}

}  // namespace layerd::wire
