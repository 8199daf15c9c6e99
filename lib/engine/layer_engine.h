// The one interface of layerd: something that evaluates layers.
//
// CpuEngine computes; decorators wrap an engine and are engines; RemoteEngine, in the client library, sends the call
// over the wire. One contract test suite runs against all of them and compares bits.
#ifndef LAYERD_LIB_ENGINE_LAYER_ENGINE_H_
#define LAYERD_LIB_ENGINE_LAYER_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/base/memory_place.h"
#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/normalize.h"
#include "lib/layers/packed_feed_forward.h"
#include "lib/reference/error_report.h"

namespace layerd {

// What a call carries beside its tensors.
struct CallContext {
  // Work that has not begun by then is not begun; long work is given up between its parts.
  absl::Time deadline = absl::InfiniteFuture();
  // Set by the caller when it no longer wants the answer; null: it never will be.
  std::shared_ptr<const std::atomic<bool>> cancelled;
  // It waits though the queue is full: for callers who bound by themselves how many calls they bring at a time.
  bool waits = false;
};

// OK as long as the answer is wanted; DEADLINE_EXCEEDED or CANCELLED after that. Threads: any.
absl::Status CheckContext(const CallContext& context);

// Options that a call which names its layer says the layer has; what is left out is the layer's own affair.
struct NormalizeSaid {
  std::optional<NormKind> kind;
  std::optional<double> epsilon;
  std::optional<NormRounding> rounding;
  std::optional<double> gamma_offset;
  std::optional<int64_t> group_size;
  std::optional<GatePosition> gate_position;
  std::optional<int> normalized_axes;
};
struct FeedForwardSaid {
  std::optional<FeedForwardForm> form;
  std::optional<Activation> activation;
  std::optional<double> swish_beta;
  std::optional<GateUpPacking> packing;
  std::optional<WeightLayout> layout;
  std::optional<double> gate_max;
  std::optional<double> up_limit;
  std::optional<double> up_offset;
  std::optional<InnerNorm> inner_norm;
};

// A call's `output_memory` is where its output is wanted: the result's `outputs.output` lies there then, with the same bits
// as elsewhere. It must have room for the output and overlap no tensor of the call (INVALID_ARGUMENT). What is there
// after an error is not said.
struct NormalizeCall {
  std::string layer;   // models/{model}/layers/{layer}; empty: the layer comes with the call
  NormalizeSaid said;  // with a name only
  NormalizeSpec spec;  // without a name only
  NormalizeInputs inputs;
  std::optional<DType> output_dtype;         // left out: the input's
  std::optional<MemoryPlace> output_memory;  // see below
  bool verify = false;                       // report the error against the float64 reference
  bool intermediates = false;                // answer the statistics too
  CallContext context;
};

struct NormalizeResult {
  NormalizeOutputs outputs;
  std::optional<ErrorReport> report;  // with `verify`
  std::string layer_hash;             // content hash of the layer that was named
  std::shared_ptr<const void> held;   // room that the engine keeps for the outputs; to be let go with them
};

struct FeedForwardCall {
  std::string layer;           // as in NormalizeCall
  FeedForwardSaid said;        // with a name only
  FeedForwardSpec spec;        // without a name only
  FeedForwardWeights weights;  // without a name only
  // Set by ResidentEngine alone, in place of the name: the weights, of which `spec` and `weights` are then options and
  // outline.
  std::shared_ptr<const PackedFeedForward> packed;
  Tensor input;
  std::optional<DType> output_dtype;         // left out: the input's
  std::optional<MemoryPlace> output_memory;  // see below
  bool verify = false;                       // report the errors against the float64 reference
  bool intermediates = false;                // answer the values inside too
  CallContext context;
};

struct FeedForwardResult {
  FeedForwardOutputs outputs;
  std::optional<ErrorReport> report;  // with `verify`
  std::string layer_hash;             // as in NormalizeResult
  std::shared_ptr<const void> held;   // likewise
};

// OK where the call has no output_memory, or has it as it must be for an output of `bytes`. INVALID_ARGUMENT otherwise, field
// "output_memory": MISALIGNED, OUT_OF_RANGE, OVERLAP. Threads: pure functions.
absl::Status CheckOutputMemory(const NormalizeCall& call, DType dtype, int64_t bytes);
absl::Status CheckOutputMemory(const FeedForwardCall& call, DType dtype, int64_t bytes);

using NormalizeDone = absl::AnyInvocable<void(absl::StatusOr<NormalizeResult>)>;
using FeedForwardDone = absl::AnyInvocable<void(absl::StatusOr<FeedForwardResult>)>;

// Threads: every method may be called from any thread at any time.
class LayerEngine {
 public:
  virtual ~LayerEngine() = default;

  // Each takes its call over and calls `done` exactly once, on the calling thread or on another one, before or after it
  // returns. `done` must not block for long. Errors, with details (lib/base/errors.h): INVALID_ARGUMENT for what does
  // not fit, RESOURCE_EXHAUSTED for what is too large or comes at a busy time, DEADLINE_EXCEEDED and CANCELLED for work
  // that was not begun, or given up. An engine that has no layers of its own answers a name with NOT_FOUND.
  virtual void Normalize(NormalizeCall call, NormalizeDone done) = 0;
  virtual void FeedForward(FeedForwardCall call, FeedForwardDone done) = 0;

  // The error that a call would get now for want of time or room, whatever it is, before anything is known of it but its
  // context; OK where it may be taken, or this engine cannot tell.
  virtual absl::Status CheckAdmission(const CallContext& /*context*/) { return absl::OkStatus(); }
};

// The same, waiting for the answer.
absl::StatusOr<NormalizeResult> Normalize(LayerEngine& engine, NormalizeCall call);
absl::StatusOr<FeedForwardResult> FeedForward(LayerEngine& engine, FeedForwardCall call);

}  // namespace layerd

#endif  // LAYERD_LIB_ENGINE_LAYER_ENGINE_H_
