// Feed-forward layers in every form, dtype, orientation and packing, as they came and packed.
#ifndef LAYERD_TESTS_LIB_LAYERS_LAYER_TESTING_H_
#define LAYERD_TESTS_LIB_LAYERS_LAYER_TESTING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/tensor.h"
#include "lib/layers/feed_forward.h"
#include "lib/layers/packed_feed_forward.h"
#include "lib/layers/seeded.h"
#include "tests/lib/layers/int8_testing.h"

namespace layerd {

struct LayerForm {
  std::string name;
  FeedForwardSpec spec;
  bool biases = false;
};

inline std::vector<LayerForm> LayerForms() {
  std::vector<LayerForm> forms;
  const auto add = [&](const char* name, FeedForwardForm form, Activation activation, GateUpPacking packing,
                       bool biases) -> FeedForwardSpec& {
    forms.push_back({name, {}, biases});
    forms.back().spec.form = form;
    forms.back().spec.activation = {activation};
    forms.back().spec.packing = packing;
    return forms.back().spec;
  };
  constexpr auto kGated = FeedForwardForm::kGated, kPlain = FeedForwardForm::kPlain;
  constexpr auto kSeparate = GateUpPacking::kSeparate;
  add("swiglu", kGated, Activation::kSilu, kSeparate, false);
  add("geglu in halves with biases", kGated, Activation::kGelu, GateUpPacking::kHalves, true);
  FeedForwardSpec& limited = add("interleaved with limits, offset and biases", kGated, Activation::kQuickGelu,
                                 GateUpPacking::kInterleaved, true);
  limited.gate_max = 0.5, limited.up_limit = 0.75, limited.up_offset = 1;
  add("relu squared with inner norm", kGated, Activation::kReluSquared, kSeparate, false).inner_norm = InnerNorm{1e-5};
  add("plain gelu_tanh with biases", kPlain, Activation::kGeluTanh, kSeparate, true);
  add("plain silu with inner norm", kPlain, Activation::kSilu, kSeparate, false).inner_norm = InnerNorm{};
  return forms;
}

// Dtypes of the gate (or gate_up), up and down.
struct WeightKind {
  std::string name;
  DType gate, up, down;
};

inline std::vector<WeightKind> WeightKinds(WeightLayout layout) {
  std::vector<WeightKind> kinds;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    kinds.push_back({std::string(Name(dtype)), dtype, dtype, dtype});
  }
  kinds.push_back({"three dtypes", DType::kBFloat16, DType::kFloat32, DType::kFloat16});
  if (layout == WeightLayout::kInOut) return kinds;
  kinds.push_back({"int8", DType::kInt8, DType::kInt8, DType::kInt8});
  kinds.push_back({"int8 and others", DType::kInt8, DType::kBFloat16, DType::kInt8});
  return kinds;
}

inline FeedForwardWeights MakeWeights(const LayerForm& form, const WeightKind& kind, int64_t dim, int64_t hidden_dim) {
  const auto all_of = [&](DType dtype) {
    return dtype == DType::kInt8 ? SeededInt8Weights(3, form.spec, dim, hidden_dim, form.biases)
                                 : SeededFeedForwardWeights(3, form.spec, dtype, dim, hidden_dim, form.biases);
  };
  FeedForwardWeights weights = all_of(kind.up);
  const FeedForwardWeights gate = all_of(kind.gate), down = all_of(kind.down);
  weights.gate = gate.gate, weights.gate_scale = gate.gate_scale;
  weights.gate_up = gate.gate_up, weights.gate_up_scale = gate.gate_up_scale;
  weights.down = down.down, weights.down_scale = down.down_scale;
  return weights;
}

// A layer that computes with its weights as they came, or packed.
class TestLayer {
 public:
  TestLayer(const FeedForwardSpec& spec, const FeedForwardWeights& weights, bool packed)
      : spec_(spec), weights_(weights) {
    if (packed) packed_ = PackedFeedForward::Of(Arena(1), spec, weights);
  }

  FeedForwardOutputs Compute(const Arena& arena, const Tensor& input, bool intermediates = false) const {
    auto outputs = packed_ ? FeedForward(arena, *packed_, input, std::nullopt, intermediates)
                           : FeedForward(arena, spec_, weights_, input, std::nullopt, intermediates);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return outputs.ok() ? *std::move(outputs) : FeedForwardOutputs();
  }

 private:
  FeedForwardSpec spec_;
  FeedForwardWeights weights_;
  std::optional<PackedFeedForward> packed_;
};

// Calls check(name, layer) for all of them, of d → h → d.
template <typename Check>
void ForEachLayer(int64_t dim, int64_t hidden_dim, const Check& check) {
  for (const LayerForm& form : LayerForms()) {
    for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
      for (const WeightKind& kind : WeightKinds(layout)) {
        LayerForm of_layout = form;
        of_layout.spec.layout = layout;
        const FeedForwardWeights weights = MakeWeights(of_layout, kind, dim, hidden_dim);
        for (const bool packed : {false, true}) {
          const std::string name = form.name + ", " + kind.name +
                                   (layout == WeightLayout::kInOut ? " [in, out]" : " [out, in]") +
                                   (packed ? ", packed" : "");
          SCOPED_TRACE(name);
          check(name, TestLayer(of_layout.spec, weights, packed));
        }
      }
    }
  }
}

// Rows first … first + count − 1 of a matrix, copied.
inline Tensor RowsOf(const Tensor& matrix, int64_t first, int64_t count) {
  Tensor rows = Tensor::Allocate(matrix.dtype(), {count, matrix.dim(1)});
  const int64_t row_bytes = matrix.dim(1) * static_cast<int64_t>(SizeOf(matrix.dtype()));
  std::memcpy(rows.mutable_data(), matrix.data() + first * row_bytes, rows.num_bytes());
  return rows;
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_LAYERS_LAYER_TESTING_H_
