// layerctl demo: RMSNorm beside LayerNorm, and gates, for people who want to see what they do.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/commands.h"
#include "client/output.h"
#include "lib/layers/accounting.h"
#include "lib/layers/seeded.h"

namespace layerd {
namespace {

using Values = std::vector<float>;

// Everything the demo shows is asked of the server through this.
class Asker {
 public:
  explicit Asker(const Session& session) : session_(session), engine_(session.EngineOptions()) {}

  absl::StatusOr<Values> Norm(NormKind kind, const Values& x) {
    NormalizeCall call;
    call.spec.kind = kind;
    call.spec.epsilon = 0;  // so that scaling the input changes nothing, to the bit
    call.inputs.input = Tensor::FromFloats(DType::kFloat32, {static_cast<int64_t>(x.size())}, x);
    call.context.deadline = session_.Deadline();
    const auto result = Normalize(engine_, std::move(call));
    if (!result.ok()) return result.status();
    return result->outputs.output.ToFloats();
  }

  absl::StatusOr<Tensor> Layer(FeedForwardCall call) {
    call.context.deadline = session_.Deadline();
    auto result = FeedForward(engine_, std::move(call));
    if (!result.ok()) return result.status();
    return result->outputs.output;
  }

  // One channel of a gated layer with weights 1: act(gate) · value.
  absl::StatusOr<float> Gate(Activation activation, float gate, float value) {
    FeedForwardCall call;
    call.spec.activation = {activation};
    call.input = Tensor::FromFloats(DType::kFloat32, {1, 2}, {gate, value});
    call.weights.gate = Tensor::FromFloats(DType::kFloat32, {1, 2}, {1, 0});
    call.weights.up = Tensor::FromFloats(DType::kFloat32, {1, 2}, {0, 1});
    call.weights.down = Tensor::FromFloats(DType::kFloat32, {1, 1}, {1});
    const auto output = Layer(std::move(call));
    if (!output.ok()) return output.status();
    if (output->num_elements() != 1) return MalformedAnswer("has not one element");
    return output->At(0);
  }

 private:
  const Session& session_;
  RemoteEngine engine_;
};

// "      ######|            " for −1, "            |######      " for 1.
std::string Bar(float value) {
  constexpr int kHalf = 12;
  constexpr float kFull = 2.0f;
  const int length = std::min(kHalf, static_cast<int>(std::lround(std::fabs(value) / kFull * kHalf)));
  std::string left(kHalf, ' '), right(kHalf, ' ');
  std::fill_n(value < 0 ? left.end() - length : right.begin(), length, '#');
  return absl::StrCat(left, "|", right);
}

Values Mapped(const Values& x, float factor, float summand) {
  Values mapped;
  for (const float v : x) mapped.push_back(v * factor + summand);
  return mapped;
}

// Printed values that differ.
int Changed(const Values& a, const Values& b) {
  int changed = 0;
  for (size_t i = 0; i < a.size(); ++i) changed += ThreeDecimals(a[i]) != ThreeDecimals(b[i]);
  return changed;
}

void PrintRow(const char* name, const Values& values, const Values& before) {
  std::printf("  %-12s", name);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string text = ThreeDecimals(values[i]);
    std::printf(" %8s%c", text.c_str(), text == ThreeDecimals(before[i]) ? ' ' : '*');
  }
  std::printf("\n");
}

// Each part prints what the server answered, appends what was seen of it to `seen`, and gives the exit status.
absl::StatusOr<int> ShowNorms(Asker& asker, std::string& seen) {
  const Values x = {0.5f, -1.5f, 2.0f, 1.0f};
  const std::pair<const char*, Values> inputs[] = {{"x", x}, {"x * 2", Mapped(x, 2, 0)}, {"x + 2", Mapped(x, 1, 2)}};
  std::printf(
      "LayerNorm takes away the mean and divides by the spread; RMSNorm only divides by the root of the mean square\n");
  std::printf("(epsilon 0; * marks a printed value that changed)\n\n");
  bool as_known = true;
  for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
    const char* name = kind == NormKind::kLayerNorm ? "LayerNorm" : "RMSNorm";
    std::printf("%s\n", name);
    Values first;
    int changed[3] = {};
    for (int i = 0; i < 3; ++i) {
      const auto y = asker.Norm(kind, inputs[i].second);
      if (!y.ok()) return y.status();
      if (y->size() != x.size()) return MalformedAnswer("has another size than the input");
      if (i == 0) first = *y;
      changed[i] = Changed(first, *y);
      PrintRow(inputs[i].first, *y, first);
    }
    for (size_t i = 0; i < first.size(); ++i) {
      std::printf("    %6s -> %8s  %s\n", ThreeDecimals(x[i]).c_str(), ThreeDecimals(first[i]).c_str(),
                  Bar(first[i]).c_str());
    }
    std::printf("\n");
    const auto verdict = [&](int i) {
      return changed[i] == 0 ? std::string("unchanged") : absl::StrCat(changed[i], " of ", x.size(), " values changed");
    };
    absl::StrAppend(&seen, "  ", name, ": x * 2 ", verdict(1), "; x + 2 ", verdict(2), "\n");
    as_known = as_known && changed[1] == 0 && (changed[2] == 0) == (kind == NormKind::kLayerNorm);
  }
  return as_known ? kExitOk : kExitOutsideContract;
}

absl::StatusOr<int> ShowGates(Asker& asker, std::string& seen) {
  std::printf("A gate multiplies a value: sigmoid(gate) * value (GLU), silu(gate) * value (SwiGLU)\n");
  std::printf("  %-10s %8s %8s %8s %8s\n", "", "gate", "value", "GLU", "SwiGLU");
  bool as_known = true;
  const std::pair<const char*, float> gates[] = {{"closed", -20.0f}, {"half open", 0.0f}, {"open", 20.0f}};
  for (const auto& [name, gate] : gates) {
    for (const float value : {3.0f, -3.0f}) {
      const auto glu = asker.Gate(Activation::kSigmoid, gate, value);
      if (!glu.ok()) return glu.status();
      const auto swiglu = asker.Gate(Activation::kSilu, gate, value);
      if (!swiglu.ok()) return swiglu.status();
      std::printf("  %-10s %8s %8s %8s %8s  %s\n", name, ThreeDecimals(gate).c_str(), ThreeDecimals(value).c_str(),
                  ThreeDecimals(*glu).c_str(), ThreeDecimals(*swiglu).c_str(), Bar(*glu / 2).c_str());
      const float open = gate < 0 ? 0.0f : gate > 0 ? 1.0f : 0.5f;
      as_known = as_known && ThreeDecimals(*glu) == ThreeDecimals(open * value);
    }
  }
  absl::StrAppend(&seen, "  A closed gate silences its channel whatever the value is, an open one passes it: ",
                  as_known ? "yes" : "NO", "\n");
  return as_known ? kExitOk : kExitOutsideContract;
}

absl::StatusOr<int> ShowFeedForwards(Asker& asker, std::string&) {
  constexpr int64_t kRows = 4, kDim = 512;
  constexpr uint64_t kSeed = 1;
  std::printf("\nThe same parameters, spent on width or on a gate (4 rows of width 512, weights from seed 1)\n");
  std::printf("  %-8s %8s %12s   %s\n", "layer", "hidden", "parameters", "output");
  bool as_known = true;
  for (const auto& [name, spec, hidden] :
       {std::tuple("ReLU", ReluSpec(), int64_t{2048}), std::tuple("SwiGLU", SwiGluSpec(), int64_t{1365})}) {
    FeedForwardCall call;
    call.spec = spec;
    call.input = SeededInput(kSeed, DType::kFloat32, {kRows, kDim});
    call.weights = SeededFeedForwardWeights(kSeed, spec, DType::kFloat32, kDim, hidden, /*biases=*/false);
    const auto cost = CostOf(spec.form, kDim, hidden, /*biases=*/false, DType::kFloat32, DType::kFloat32);
    if (!cost.ok()) return cost.status();
    const auto output = asker.Layer(std::move(call));
    if (!output.ok()) return output.status();
    std::printf("  %-8s %8ld %12ld   %s\n", name, static_cast<long>(hidden), static_cast<long>(cost->parameters),
                ToString(output->shape()).c_str());
    as_known = as_known && output->shape() == Shape{kRows, kDim};
  }
  return as_known ? kExitOk : kExitOutsideContract;
}

int RunDemo(const Session& session) {
  Asker asker(session);
  int worst = kExitOk;
  std::string seen;
  for (const auto show : {ShowNorms, ShowGates, ShowFeedForwards}) {
    const auto exit_status = show(asker, seen);
    if (!exit_status.ok()) return FailRemotely(exit_status.status());
    worst = std::max(worst, *exit_status);
  }
  std::printf("\nSeen:\n%s", seen.c_str());
  return worst;
}

}  // namespace

void RegisterDemo(CLI::App& app, Actions& actions) {
  auto* command = app.add_subcommand("demo", "what norms and gates do, with figures from the server");
  actions[command] = {.run = RunDemo, .prints_json = false};
}

}  // namespace layerd
