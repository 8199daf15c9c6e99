// What every engine keeps that knows layers by name, whatever it is made of: a second suite beside EngineContractTest, to
// be instantiated for engines that have the layers of ContractLayers.
#ifndef LAYERD_TESTS_CONTRACT_LAYERS_BY_NAME_CONTRACT_H_
#define LAYERD_TESTS_CONTRACT_LAYERS_BY_NAME_CONTRACT_H_

#include <gtest/gtest.h>

#include "lib/resident/layer_library.h"
#include "tests/contract/engine_contract.h"
#include "tests/lib/resident/memory_catalog.h"

namespace layerd {

// The layers that the suite asks for, and a library of them: for a ResidentEngine, or the server above one.
class ContractLayers {
 public:
  ContractLayers();
  LayerLibrary& library() { return library_; }

 private:
  MemoryCatalog catalog_;
  LayerLibrary library_{{&catalog_}, {}};  // last: it uses the catalogue
};

class LayersByNameContractTest : public EngineContractTest {};

}  // namespace layerd

#endif  // LAYERD_TESTS_CONTRACT_LAYERS_BY_NAME_CONTRACT_H_
