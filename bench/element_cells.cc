// Cells of the element functions: activations, the gating, and conversions between dtypes, over a million values.
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/cell.h"
#include "bench/random_data.h"
#include "bench/shapes.h"
#include "lib/kernels/activation.h"
#include "lib/kernels/convert.h"
#include "lib/layers/seeded.h"
#include "lib/reference/reference.h"

namespace layerd::bench {
namespace {

constexpr int64_t kCount = 1 << 20;
constexpr int64_t kGrain = 16384;   // as in the layers
constexpr int64_t kChecked = 4096;  // values compared with the reference

constexpr std::pair<Activation, std::string_view> kActivations[] = {
    {Activation::kIdentity, "identity"},        {Activation::kSigmoid, "sigmoid"}, {Activation::kRelu, "relu"},
    {Activation::kReluSquared, "relu_squared"}, {Activation::kGelu, "gelu"},       {Activation::kGeluTanh, "gelu_tanh"},
    {Activation::kQuickGelu, "quick_gelu"},     {Activation::kSilu, "silu"},
};

struct Elements {
  Tensor a, b, out;
};

std::shared_ptr<Elements> ElementsOf(const Arena& arena, DType in, DType out) {
  return std::make_shared<Elements>(Elements{NormalTensor(arena, 1, in, {kCount}, 3.0),
                                             NormalTensor(arena, 2, in, {kCount}), HugeTensor(out, {kCount})});
}

// One cell: compute(elements, begin, n) is divided over the arena, want(elements, i) is the exact value.
void AddElements(CellName name, DType in, DType out, double bytes_of_element,
                 std::function<void(Elements&, int64_t, int64_t)> compute,
                 const std::function<double(const Elements&, int64_t)>& want, std::vector<Cell>& cells) {
  name.rows = 1;
  name.dim = kCount;
  cells.push_back({.name = name, .bound = Bound::kCopy, .prepare = [=](const Arena& arena) {
                     const std::shared_ptr<Elements> elements = ElementsOf(arena, in, out);
                     Work work;
                     work.run = [&arena, elements, compute] {
                       arena.For(kCount, kGrain,
                                 [&](int64_t begin, int64_t end) { compute(*elements, begin, end - begin); });
                     };
                     work.error = [elements, want] {
                       std::vector<float> got;
                       std::vector<double> exact;
                       for (int64_t i = 0; i < kChecked; ++i) {
                         got.push_back(elements->out.At(i));
                         exact.push_back(want(*elements, i));
                       }
                       return RelativeError(got, exact);
                     };
                     work.max_error = out == DType::kFloat32 ? 2e-6 : out == DType::kFloat16 ? 1e-2 : 1e-1;
                     work.bytes = bytes_of_element * static_cast<double>(kCount);
                     return work;
                   }});
}

void AddConversions(DType dtype, int threads, std::vector<Cell>& cells) {
  const std::string name(Name(dtype));
  const auto size = static_cast<int64_t>(SizeOf(dtype));
  AddElements(
      {.kernel = "widen", .dtype = name, .threads = threads}, dtype, DType::kFloat32, 4.0 + static_cast<double>(size),
      [=](Elements& e, int64_t begin, int64_t n) {
        WidenToFloat(dtype, e.a.data() + begin * size, e.out.mutable_floats() + begin, n);
      },
      [](const Elements& e, int64_t i) { return static_cast<double>(e.a.At(i)); }, cells);
  AddElements(
      {.kernel = "narrow", .dtype = name, .threads = threads}, DType::kFloat32, dtype, 4.0 + static_cast<double>(size),
      [=](Elements& e, int64_t begin, int64_t n) {
        NarrowFromFloat(dtype, e.a.floats() + begin, e.out.mutable_data() + begin * size, n);
      },
      [](const Elements& e, int64_t i) { return static_cast<double>(e.a.At(i)); }, cells);
}

}  // namespace

void AddElementCells(const std::vector<int>& threads, std::vector<Cell>& cells) {
  for (const int count : threads) {
    for (const auto& [kind, name] : kActivations) {
      const ActivationFunction activation{kind};
      AddElements(
          {.kernel = "activation", .variant = std::string(name), .dtype = "float32", .threads = count}, DType::kFloat32,
          DType::kFloat32, 8,
          [=](Elements& e, int64_t begin, int64_t n) {
            ApplyActivation(activation, e.a.floats() + begin, e.out.mutable_floats() + begin, n);
          },
          [=](const Elements& e, int64_t i) { return reference::Activate(activation, e.a.At(i)); }, cells);
    }
    const Gating gating{{Activation::kSilu}};
    AddElements(
        {.kernel = "gating", .variant = "silu", .dtype = "float32", .threads = count}, DType::kFloat32, DType::kFloat32,
        12,
        [=](Elements& e, int64_t begin, int64_t n) {
          ApplyGating(gating, e.a.floats() + begin, e.b.floats() + begin, e.out.mutable_floats() + begin, n);
        },
        [](const Elements& e, int64_t i) { return reference::Gate(SwiGluSpec(), e.a.At(i), e.b.At(i)); }, cells);
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) AddConversions(dtype, count, cells);
  }
}

}  // namespace layerd::bench
