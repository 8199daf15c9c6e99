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

// Where a call's layer comes from: with the call, or it may also live on the server (--layer).
enum class LayerPlace : uint8_t { kWithCall, kAnywhere };

// Options that both layers have.
struct CommonCallOptions {
  std::string layer;  // the name of a resident layer
  std::string input;
  DType dtype = DType::kFloat32;  // of typed and of seeded tensors
  std::optional<DType> output_dtype;
  bool verify = false;
  bool intermediates = false;
  std::optional<uint64_t> seed;  // tensors that are not given come from it
  int64_t rows = 4;              // of a seeded input
  int64_t dim = 0;               // of a seeded input
  std::string weights_file;      // a checkpoint, or a file of one layer
  std::string prefix;            // of the layer in it

  // Whether the input is to come from the seed and its width is the resident layer's, which only the server knows.
  bool NeedsWidth() const { return !layer.empty() && input.empty() && seed && dim == 0; }
};

struct NormalizeOptions {
  CommonCallOptions common;
  NormalizeSaid said;
  std::string gamma, beta, residual, gate;

  void Register(CLI::App& app, LayerPlace place);
  // INVALID_ARGUMENT, naming the option, for what is missing or does not fit; the errors of the files.
  absl::StatusOr<NormalizeCall> Build() const;
};

struct FeedForwardOptions {
  CommonCallOptions common;
  FeedForwardSaid said;
  int64_t hidden_dim = 0;                      // of seeded weights
  bool biases = false;                         // of seeded weights
  std::map<std::string, std::string> weights;  // "gate" → where it comes from

  void Register(CLI::App& app, LayerPlace place);
  // As NormalizeOptions::Build().
  absl::StatusOr<FeedForwardCall> Build() const;
};

}  // namespace layerd

#endif  // LAYERD_CLIENT_CALL_OPTIONS_H_
