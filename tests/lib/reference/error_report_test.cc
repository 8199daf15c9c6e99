#include "lib/reference/error_report.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace layerd {
namespace {

ErrorReport ReportOf(double error, bool within_contract, std::vector<StageReport> stages) {
  return {error, 10 * error, 100 * error, within_contract, std::move(stages)};
}

TEST(ErrorReportTest, MergingTakesTheGreatestOfEachStage) {
  ErrorReport report = ReportOf(1, true, {{"gate", 1, 20, 3, 0.5}, {"output", 1, 2, 3, 0.25}});
  Merge(ReportOf(2, true, {{"gate", 2, 10, 4, 0.25}, {"output", 0, 0, 0, 0.75}}), report);
  EXPECT_EQ(report.max_abs_error, 2);
  EXPECT_EQ(report.max_rel_error, 20);
  EXPECT_EQ(report.max_ulp_error, 200);
  EXPECT_TRUE(report.within_contract);
  ASSERT_EQ(report.stages.size(), 2u);
  const StageReport& gate = report.stages[0];
  EXPECT_EQ(gate.stage, "gate");
  EXPECT_EQ(gate.max_abs_error, 2);
  EXPECT_EQ(gate.max_rel_error, 20);
  EXPECT_EQ(gate.max_ulp_error, 4);
  EXPECT_EQ(gate.max_error_over_bound, 0.5);
  EXPECT_EQ(report.stages[1].max_abs_error, 1);
  EXPECT_EQ(report.stages[1].max_error_over_bound, 0.75);
}

TEST(ErrorReportTest, OnePartOutsideTheContractIsTheWhole) {
  for (const bool first : {true, false}) {
    ErrorReport report = ReportOf(1, first, {});
    Merge(ReportOf(0, !first, {{"norm", 0, 0, 0, 2}}), report);
    EXPECT_FALSE(report.within_contract);
    EXPECT_EQ(report.max_abs_error, 1);
    ASSERT_EQ(report.stages.size(), 1u);
    EXPECT_EQ(report.stages[0].max_error_over_bound, 2);
  }
}

}  // namespace
}  // namespace layerd
