// layerctl selftest: values that are known beforehand, computed by the server.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/commands.h"
#include "client/output.h"

namespace layerd {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  std::string name;
  std::function<absl::StatusOr<Tensor>(LayerEngine&, absl::Time)> ask;
  std::vector<double> expected;
  double rel_tolerance = 1e-6;
};

Tensor Row(const std::vector<float>& values, DType dtype = DType::kFloat32) {
  const auto size = static_cast<int64_t>(values.size());
  return Tensor::FromFloats(dtype, {1, size}, values);
}

Case NormCase(std::string name, const NormalizeSpec& spec, const NormalizeInputs& inputs,
              std::vector<double> expected) {
  return {std::move(name),
          [spec, inputs](LayerEngine& engine, absl::Time deadline) -> absl::StatusOr<Tensor> {
            NormalizeCall call;
            call.spec = spec;
            call.inputs = inputs;
            call.context.deadline = deadline;
            auto result = Normalize(engine, std::move(call));
            if (!result.ok()) return result.status();
            return result->outputs.output;
          },
          std::move(expected)};
}

// `activation` of each value, as a plain layer with the identity for both matrices.
Case ActivationCase(std::string name, Activation activation, const std::vector<float>& x,
                    std::vector<double> expected) {
  return {std::move(name),
          [activation, x](LayerEngine& engine, absl::Time deadline) -> absl::StatusOr<Tensor> {
            // One row a value, so that what is not finite meets nothing else.
            FeedForwardCall call;
            call.spec.form = FeedForwardForm::kPlain;
            call.spec.activation = {activation};
            call.input = Tensor::FromFloats(DType::kFloat32, {static_cast<int64_t>(x.size()), 1}, x);
            call.weights.up = Tensor::FromFloats(DType::kFloat32, {1, 1}, {1});
            call.weights.down = Tensor::FromFloats(DType::kFloat32, {1, 1}, {1});
            call.context.deadline = deadline;
            auto result = FeedForward(engine, std::move(call));
            if (!result.ok()) return result.status();
            return result->outputs.output;
          },
          std::move(expected)};
}

std::vector<Case> Cases() {
  NormalizeSpec rms, layer;
  layer.kind = NormKind::kLayerNorm;
  NormalizeSpec rms_zero_epsilon = rms;
  rms_zero_epsilon.epsilon = 0;
  NormalizeSpec gemma = rms;
  gemma.gamma_offset = 1;
  gemma.rounding = NormRounding::kAfterGamma;
  const auto input = [](Tensor x) {
    NormalizeInputs inputs;
    inputs.input = std::move(x);
    return inputs;
  };
  NormalizeInputs gemma_inputs = input(Row({3, 1, 4, 1}, DType::kBFloat16));
  gemma_inputs.gamma = Tensor::FromFloats(DType::kBFloat16, {4}, {15.8125f, 15.8125f, 15.8125f, 15.8125f});
  return {
      NormCase("LayerNorm of [0.5, -1.5, 2, 1], eps 1e-5", layer, input(Row({0.5f, -1.5f, 2, 1})),
               {0, -1.5689242, 1.1766931, 0.39223104}),
      NormCase("RMSNorm of [0.5, -1.5, 2, 1], eps 0", rms_zero_epsilon, input(Row({0.5f, -1.5f, 2, 1})),
               {0.36514837, -1.0954451, 1.4605935, 0.73029674}),
      NormCase("eps inside the root", rms, input(Row({1e-3f, 1e-3f, 1e-3f, 1e-3f})),
               {0.7071068, 0.7071068, 0.7071068, 0.7071068}),
      NormCase("squares beyond float32", rms, input(Row({1e20f, -1e20f, 0, 0})), {1.4142135, -1.4142135, 0, 0}),
      NormCase("a row of zeros, eps 0", rms_zero_epsilon, input(Row({0, 0, 0, 0})), {0, 0, 0, 0}),
      NormCase("a variance that would cancel", layer, input(Row({2000, 2001, 2003, 1998})),
               {-0.27734967, 0.27734967, 1.3867484, -1.3867484}),
      NormCase("denormals are kept", rms, input(Row({1e-40f, 1e-40f})), {1e-37, 1e-37}),
      NormCase("1 + gamma in more than bfloat16 (Gemma)", gemma, gemma_inputs, {19.375, 6.46875, 25.875, 6.46875}),
      ActivationCase("silu in its tails", Activation::kSilu, {-90, -kInfinity, 0, 20, kInfinity},
                     {-7.37461e-38, 0, 0, 20, kInfinity}),
      ActivationCase("gelu in its tail", Activation::kGelu, {-5, -6}, {-1.43325786e-06, -5.91952587e-09}),
      ActivationCase("gelu_tanh in its tail", Activation::kGeluTanh, {-5, -6}, {-2.2917962e-07, -8.4396467e-11}),
      ActivationCase("relu keeps a NaN to its row", Activation::kRelu, {kNaN, -1, 2}, {kNaN, 0, 2}),
  };
}

bool Near(double got, double expected, double rel_tolerance) {
  if (std::isnan(expected)) return std::isnan(got);
  if (std::isinf(expected)) return got == expected;
  return std::fabs(got - expected) <= std::fabs(expected) * rel_tolerance + 1e-42;
}

int RunSelfTest(const Session& session) {
  RemoteEngine engine(session.EngineOptions());
  int failed = 0;
  std::string json;
  const std::vector<Case> cases = Cases();
  for (const Case& one : cases) {
    const auto output = one.ask(engine, session.Deadline());
    if (!output.ok()) return FailRemotely(output.status());
    bool good = output->num_elements() == static_cast<int64_t>(one.expected.size());
    for (int64_t i = 0; good && i < output->num_elements(); ++i) {
      good = Near(output->At(i), one.expected[i], one.rel_tolerance);
    }
    if (session.json) {
      absl::StrAppend(&json, json.empty() ? "" : ",\n ", "{\"name\": \"", one.name,
                      "\", \"right\": ", good ? "true}" : "false}");
    } else {
      std::printf("%-8s %s\n", good ? "ok" : "FAILED", one.name.c_str());
    }
    failed += !good;
  }
  if (session.json) {
    std::printf("[%s]\n", json.c_str());
  } else {
    std::printf("%d of %d right\n", static_cast<int>(cases.size()) - failed, static_cast<int>(cases.size()));
  }
  return failed == 0 ? kExitOk : kExitOutsideContract;
}

}  // namespace

void RegisterSelfTest(CLI::App& app, Actions& actions) {
  auto* command = app.add_subcommand("selftest", "values known beforehand, computed by the server");
  command->footer("examples:\n  layerctl selftest");
  actions[command] = {.run = RunSelfTest};
}

}  // namespace layerd
