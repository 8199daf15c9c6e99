#include "lib/engine/resident_engine.h"

#include <charconv>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

using LayerPtr = std::shared_ptr<const PreparedLayer>;

absl::Status TwoSources(std::string_view field, const Tensor& tensor) {
  return InvalidField(field, "TWO_SOURCES",
                      absl::StrCat("expected no weights beside the name of a layer, got ", ToString(tensor.shape())));
}

absl::Status CheckOneSource(const NormalizeCall& call) {
  if (call.inputs.gamma) return TwoSources("gamma", *call.inputs.gamma);
  if (call.inputs.beta) return TwoSources("beta", *call.inputs.beta);
  return absl::OkStatus();
}

absl::Status CheckOneSource(const FeedForwardCall& call) {
  for (const auto& [role, member] : kFeedForwardRoles) {
    const std::optional<Tensor>& tensor = call.weights.*member;
    if (tensor) return TwoSources(absl::StrCat("weights.", std::string(role)), *tensor);
  }
  return absl::OkStatus();
}

// The shortest digits that tell `value` from all others.
std::string Text(double value) {
  char buffer[32];
  return {buffer, std::to_chars(std::begin(buffer), std::end(buffer), value).ptr};
}
std::string Text(std::optional<double> value) { return value ? Text(*value) : "none"; }

// Compares what the call says of its layer with what the layer is, and keeps the first contradiction.
class Comparison {
 public:
  explicit Comparison(const std::string& layer) : layer_(layer) {}

  void Number(const char* field, std::optional<double> said, std::optional<double> is) {
    if (said && said != is) Contradict(field, Text(is), Text(said));
  }
  template <typename T, size_t kRows>
  void Name(const char* field, const std::pair<const char*, T> (&names)[kRows], std::optional<T> said, T is) {
    if (said && *said != is) Contradict(field, NameIn(names, is), NameIn(names, *said));
  }
  void Contradict(const char* field, const std::string& is, const std::string& said) {
    if (!status_.ok()) return;
    status_ =
        InvalidField(field, "CONTRADICTS_LAYER", absl::StrCat("expected ", is, " as in ", layer_, ", got ", said));
  }

  const absl::Status& status() const { return status_; }

 private:
  const std::string& layer_;
  absl::Status status_;
};

absl::Status CheckSaid(const NormalizeSaid& said, const NormalizeSpec& is, const PreparedLayer& layer) {
  Comparison comparison(layer.name);
  comparison.Name("spec.kind", kNormKindNames, said.kind, is.kind);
  comparison.Number("spec.epsilon", said.epsilon, EpsilonOf(is));
  comparison.Name("spec.rounding", kNormRoundingNames, said.rounding, is.rounding);
  comparison.Number("spec.gamma_offset", said.gamma_offset, is.gamma_offset);
  // One group over all may be written as 0 or as the whole width.
  const auto group = [&](int64_t size) { return size == layer.extent.dim ? 0 : size; };
  if (said.group_size && group(*said.group_size) != group(is.group_size)) {
    comparison.Contradict("spec.group_size", std::to_string(is.group_size), std::to_string(*said.group_size));
  }
  comparison.Name("spec.gate_position", kGatePositionNames, said.gate_position, is.gate_position);
  comparison.Number("spec.normalized_axes", said.normalized_axes, is.normalized_axes);
  return comparison.status();
}

absl::Status CheckSaid(const FeedForwardSaid& said, const FeedForwardSpec& is, const PreparedLayer& layer) {
  Comparison comparison(layer.name);
  comparison.Name("spec.form", kFeedForwardFormNames, said.form, is.form);
  comparison.Name("spec.activation", kActivationNames, said.activation, is.activation.kind);
  comparison.Number("spec.swish_beta", said.swish_beta, is.activation.beta);
  comparison.Name("spec.packing", kGateUpPackingNames, said.packing, is.packing);
  comparison.Name("spec.layout", kWeightLayoutNames, said.layout, is.layout);
  comparison.Number("spec.gate_max", said.gate_max, is.gate_max);
  comparison.Number("spec.up_limit", said.up_limit, is.up_limit);
  comparison.Number("spec.up_offset", said.up_offset, is.up_offset);
  if (said.inner_norm && !is.inner_norm) {
    comparison.Contradict("spec.inner_norm", "none", "an inner norm");
  } else if (said.inner_norm) {
    comparison.Number("spec.inner_norm.epsilon", said.inner_norm->epsilon,
                      is.inner_norm->epsilon.value_or(kDefaultInnerNormEpsilon));
  }
  return comparison.status();
}

// The layer's weights would be blamed for a width that does not fit, and the caller did not send them.
absl::Status CheckWidth(const Tensor& input, const PreparedLayer& layer) {
  if (input.rank() == 0 || input.shape().back() == layer.extent.dim) return absl::OkStatus();
  return InvalidField("input.shape", "SHAPE_MISMATCH",
                      absl::StrCat("expected the last dimension ", layer.extent.dim, " as in ", layer.name, ", got ",
                                   ToString(input.shape())));
}

const Tensor& InputOf(const NormalizeCall& call) { return call.inputs.input; }
const Tensor& InputOf(const FeedForwardCall& call) { return call.input; }

void Fill(const PreparedLayer&, const NormalizeLayer& layer, NormalizeCall& call) {
  call.spec = layer.spec;
  call.inputs.gamma = layer.weights.gamma;
  call.inputs.beta = layer.weights.beta;
}

void Fill(const PreparedLayer& prepared, const FeedForwardLayer& outline, FeedForwardCall& call) {
  call.spec = outline.spec;
  call.weights = outline.weights;
  call.packed = prepared.packed;
}

const char* KindOf(const NormalizeLayer*) { return "normalize"; }
const char* KindOf(const FeedForwardLayer*) { return "feed-forward"; }

// Puts the layer in the call in place of its name.
template <typename OneLayer, typename Call>
absl::Status Resolve(const PreparedLayer& layer, Call& call) {
  const auto* one = std::get_if<OneLayer>(&layer.layer);
  if (one == nullptr) {
    const char* const got = std::visit([](const auto& other) { return KindOf(&other); }, layer.layer);
    return InvalidField("layer", "WRONG_KIND",
                        absl::StrCat("expected a ", KindOf(one), " layer, got ", layer.name, ", a ", got, " layer"));
  }
  if (auto status = CheckSaid(call.said, one->spec, layer); !status.ok()) return status;
  if (auto status = CheckWidth(InputOf(call), layer); !status.ok()) return status;
  Fill(layer, *one, call);
  call.layer.clear();
  call.said = {};
  return absl::OkStatus();
}

}  // namespace

ResidentEngine::~ResidentEngine() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return resolving_ == 0; });
}

// Gets the layer that `call` names and passes the call on by `pass`; calls `done` exactly once.
template <typename OneLayer, typename Result, typename Call, typename Done, typename Pass>
void ResidentEngine::Submit(Call call, Done done, Pass pass) {
  if (call.layer.empty()) return pass(std::move(call), std::move(done));
  if (auto status = CheckOneSource(call); !status.ok()) return done(std::move(status));
  if (auto status = CheckContext(call.context); !status.ok()) return done(std::move(status));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++resolving_;
  }
  const std::string name = call.layer;
  const absl::Time deadline = call.context.deadline;
  layers_.Acquire(name, deadline,
                  [this, call = std::move(call), done = std::move(done),
                   pass = std::move(pass)](absl::StatusOr<LayerPtr> layer) mutable {
                    if (!layer.ok()) {
                      done(std::move(layer).status());
                    } else if (auto status = Resolve<OneLayer>(**layer, call); !status.ok()) {
                      done(std::move(status));
                    } else {
                      // The layer counts as in use for as long as the answer is not given.
                      pass(std::move(call),
                           [layer = *std::move(layer), done = std::move(done)](absl::StatusOr<Result> result) mutable {
                             if (result.ok()) result->layer_hash = layer->content_hash;
                             done(std::move(result));
                           });
                    }
                    // Whoever has the answer may end both engines, but not before this thread has left the inner one.
                    std::lock_guard<std::mutex> lock(mutex_);
                    if (--resolving_ == 0) idle_.notify_all();
                  });
}

void ResidentEngine::Normalize(NormalizeCall call, NormalizeDone done) {
  Submit<NormalizeLayer, NormalizeResult>(
      std::move(call), std::move(done),
      [this](NormalizeCall passed, NormalizeDone answer) { inner_.Normalize(std::move(passed), std::move(answer)); });
}

void ResidentEngine::FeedForward(FeedForwardCall call, FeedForwardDone done) {
  Submit<FeedForwardLayer, FeedForwardResult>(std::move(call), std::move(done),
                                              [this](FeedForwardCall passed, FeedForwardDone answer) {
                                                inner_.FeedForward(std::move(passed), std::move(answer));
                                              });
}

}  // namespace layerd
