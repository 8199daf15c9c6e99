// Both suites for a ResidentEngine above a CpuEngine.
#include "lib/engine/cpu_engine.h"
#include "lib/engine/resident_engine.h"
#include "tests/contract/layers_by_name_contract.h"

namespace layerd {
namespace {

struct Below {
  ContractLayers layers;
  CpuEngine engine{{.threads = 2}};
};

EngineUnderTest MakeResidentEngine() {
  auto below = std::make_shared<Below>();
  return {below, std::make_unique<ResidentEngine>(below->layers.library(), below->engine)};
}

const EngineFactory kFactory{"OverCpuEngine", MakeResidentEngine};

INSTANTIATE_TEST_SUITE_P(ResidentEngine, EngineContractTest, testing::Values(kFactory),
                         [](const auto& factory) { return factory.param.name; });
INSTANTIATE_TEST_SUITE_P(ResidentEngine, LayersByNameContractTest, testing::Values(kFactory),
                         [](const auto& factory) { return factory.param.name; });

}  // namespace
}  // namespace layerd
