// Both suites for a ResidentEngine above an AdmissionEngine above a BatchingEngine above a CpuEngine, as in the daemon.
#include "lib/engine/admission_engine.h"
#include "lib/engine/batching_engine.h"
#include "lib/engine/cpu_engine.h"
#include "lib/engine/resident_engine.h"
#include "tests/contract/layers_by_name_contract.h"

namespace layerd {
namespace {

struct Below {
  explicit Below(const BatchingEngineOptions& options) : batching(options, cpu) {}
  ContractLayers layers;
  CpuEngine cpu{{.threads = 2, .at_once_work = 1 << 19}};
  BatchingEngine batching;
  AdmissionEngine admission{{.workers = 2}, std::make_shared<ByteBudget>(1 << 30, 0, "--flag"), batching};
};

EngineFactory Factory(const char* name, const BatchingEngineOptions& options) {
  return {name, [options]() -> EngineUnderTest {
            auto below = std::make_shared<Below>(options);
            return {below, std::make_unique<ResidentEngine>(below->layers.library(), below->admission)};
          }};
}

// Every layer heavy and every call of several rows divided; and what waits, waits for company.
const BatchSizes kDivided = {.batch_rows = 2, .heavy_weights = 1, .least_part_work = 0};
const auto kFactories = testing::Values(
    Factory("AsInTheDaemon", {.workers = 2}), Factory("Divided", {.workers = 1, .sizes = kDivided}),
    Factory("Delayed", {.workers = 2, .batch_delay = absl::Microseconds(50), .sizes = {.heavy_weights = 1}}));

INSTANTIATE_TEST_SUITE_P(BatchingEngine, EngineContractTest, kFactories,
                         [](const auto& factory) { return factory.param.name; });
INSTANTIATE_TEST_SUITE_P(BatchingEngine, LayersByNameContractTest, kFactories,
                         [](const auto& factory) { return factory.param.name; });

}  // namespace
}  // namespace layerd
