// The options of layerctl that describe a call, and the calls they describe.
#ifndef LAYERD_CLIENT_CALL_OPTIONS_H_
#define LAYERD_CLIENT_CALL_OPTIONS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "lib/base/dtype.h"
#include "lib/engine/layer_engine.h"

namespace CLI {
class App;
}

namespace layerd {

// Options that both layers have.
struct CommonCallOptions {
  std::string input;
  DType dtype = DType::kFloat32;  // of typed and of seeded tensors
  std::optional<DType> output_dtype;
  bool verify = false;
  bool intermediates = false;
  std::optional<uint64_t> seed;  // tensors that are not given come from it
  int64_t rows = 4;              // of a seeded input
  int64_t dim = 0;               // of a seeded input
  std::string weights_file;      // safetensors
  std::string prefix;            // of the layer in it
};

struct NormalizeOptions {
  CommonCallOptions common;
  std::optional<NormKind> kind;  // must be given, unless a checkpoint tells
  NormalizeSpec spec;
  std::string gamma, beta, residual, gate;

  void Register(CLI::App& app);
  absl::StatusOr<NormalizeCall> Build() const;
};

struct FeedForwardOptions {
  CommonCallOptions common;
  std::optional<FeedForwardForm> form;   // must be given, unless a checkpoint tells
  std::optional<Activation> activation;  // likewise
  std::optional<GateUpPacking> packing;
  std::optional<WeightLayout> layout;
  std::optional<double> swish_beta;
  FeedForwardSpec spec;  // limits and offset
  bool inner_norm = false;
  std::optional<double> inner_norm_epsilon;
  int64_t hidden_dim = 0;                      // of seeded weights
  bool biases = false;                         // of seeded weights
  std::map<std::string, std::string> weights;  // "gate" → where it comes from

  void Register(CLI::App& app);
  absl::StatusOr<FeedForwardCall> Build() const;
};

}  // namespace layerd

#endif  // LAYERD_CLIENT_CALL_OPTIONS_H_
