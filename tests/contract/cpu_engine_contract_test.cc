#include "lib/engine/cpu_engine.h"
#include "tests/contract/engine_contract.h"

namespace layerd {
namespace {

EngineUnderTest MakeCpuEngine(int threads) {
  CpuEngineOptions options;
  options.threads = threads;
  return {nullptr, std::make_unique<CpuEngine>(options)};
}

INSTANTIATE_TEST_SUITE_P(CpuEngine, EngineContractTest,
                         testing::Values(EngineFactory{"OneThread", [] { return MakeCpuEngine(1); }},
                                         EngineFactory{"ThreeThreads", [] { return MakeCpuEngine(3); }}),
                         [](const auto& factory) { return factory.param.name; });

}  // namespace
}  // namespace layerd
