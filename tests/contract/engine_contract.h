// What every LayerEngine keeps, whatever it is made of: a suite to be instantiated for each, which compares bits with
// the layer functions themselves.
#ifndef LAYERD_TESTS_CONTRACT_ENGINE_CONTRACT_H_
#define LAYERD_TESTS_CONTRACT_ENGINE_CONTRACT_H_

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "lib/engine/layer_engine.h"

namespace layerd {

// An engine, and whatever must live as long as it does.
struct EngineUnderTest {
  std::shared_ptr<void> below;
  std::unique_ptr<LayerEngine> engine;
};

struct EngineFactory {
  std::string name;
  std::function<EngineUnderTest()> make;
};

class EngineContractTest : public testing::TestWithParam<EngineFactory> {
 protected:
  void SetUp() override { under_test_ = GetParam().make(); }
  void TearDown() override { under_test_.engine.reset(); }
  LayerEngine& engine() { return *under_test_.engine; }

 private:
  EngineUnderTest under_test_;
};

}  // namespace layerd

#endif  // LAYERD_TESTS_CONTRACT_ENGINE_CONTRACT_H_
