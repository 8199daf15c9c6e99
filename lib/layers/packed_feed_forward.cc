#include "lib/layers/packed_feed_forward.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/layers/feed_forward_operands.h"
#include "lib/layers/layer.h"

namespace layerd {
namespace {

// Calls visit(role, tensor) for every weight there is; the tensor is const or not as `weights` is.
template <typename Weights, typename Visit>
void ForEachWeight(Weights& weights, const Visit& visit) {
  for (const auto& [role, member] : kFeedForwardRoles) {
    if (weights.*member) visit(role, *(weights.*member));
  }
}

// An input without rows, of the width that the weights expect.
Tensor NoRows(const FeedForwardSpec& spec, const FeedForwardWeights& weights) {
  const WeightView up = UpViewOf(spec, weights);
  return Tensor::WithoutData(DType::kFloat32, {0, up.in});
}

// Bytes of all matrices in panels.
int64_t MatrixBytes(const FeedForwardSpec& spec, const FeedForwardWeights& outline) {
  const auto bytes_of = [](const WeightView& view) { return Panels::BytesOf(view.dtype, view.in, view.out); };
  int64_t bytes = bytes_of(UpViewOf(spec, outline)) + bytes_of(DownViewOf(spec, outline));
  if (spec.form == FeedForwardForm::kGated) bytes += bytes_of(GateViewOf(spec, outline));
  return bytes;
}

}  // namespace

PackedFeedForward::PackedFeedForward(const FeedForwardSpec& spec, const FeedForwardWeights& outline)
    : spec_(spec), outline_(outline), extent_(*CheckFeedForward(spec, outline, NoRows(spec, outline))) {
  ForEachWeight(outline_, [](std::string_view, Tensor& tensor) {
    // Vectors are small, and kept as they came too.
    tensor = tensor.rank() == 1 ? Tensor::Allocate(tensor.dtype(), tensor.shape())
                                : Tensor::WithoutData(tensor.dtype(), tensor.shape());
  });
  const std::shared_ptr<std::byte> memory = MapHugePages(MatrixBytes(spec, outline_));
  int64_t used = 0;
  const auto panels = [&](const WeightView& view) {
    Panels result(view.dtype, view.in, view.out, std::shared_ptr<std::byte>(memory, memory.get() + used));
    used += result.num_bytes();
    return result;
  };
  if (spec.form == FeedForwardForm::kGated) gate_ = panels(GateViewOf(spec, outline_));
  up_ = panels(UpViewOf(spec, outline_));
  down_ = panels(DownViewOf(spec, outline_));
  const auto sized = [](bool wanted, int64_t size) { return std::vector<float>(wanted ? size : 0); };
  const bool both = outline_.gate_up_bias.has_value();
  gate_bias_ = sized(both || outline_.gate_bias, extent_.hidden_dim);
  up_bias_ = sized(both || outline_.up_bias, extent_.hidden_dim);
  down_bias_ = sized(outline_.down_bias.has_value(), extent_.out_dim);
  inner_norm_gamma_ = sized(outline_.inner_norm_gamma.has_value(), extent_.hidden_dim);
}

PackedFeedForward PackedFeedForward::Of(const Arena& arena, const FeedForwardSpec& spec,
                                        const FeedForwardWeights& weights) {
  PackedFeedForward packed(spec, weights);
  ForEachWeight(weights, [&](std::string_view role, const Tensor& tensor) {
    const int64_t rows = tensor.dim(0), row_bytes = static_cast<int64_t>(tensor.num_bytes()) / rows;
    constexpr int64_t kRun = 2 * kPanelOutputs;
    constexpr int64_t kRunBytes = int64_t{1} << 18;
    const int64_t runs = (rows + kRun - 1) / kRun;
    arena.For(runs, std::max<int64_t>(1, kRunBytes / (row_bytes * kRun)), [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kRun;
      packed.Put(role, first, std::min(rows, end * kRun) - first, tensor.data() + first * row_bytes);
    });
  });
  return packed;
}

int64_t PackedFeedForward::BytesOf(const FeedForwardSpec& spec, const FeedForwardWeights& outline) {
  int64_t bytes = MatrixBytes(spec, outline);
  ForEachWeight(outline, [&](std::string_view, const Tensor& tensor) {
    if (tensor.rank() != 1) return;
    bytes += static_cast<int64_t>(tensor.num_bytes()) + tensor.num_elements() * static_cast<int64_t>(sizeof(float));
  });
  return bytes;
}

void PackedFeedForward::Put(std::string_view role, int64_t first_row, int64_t rows, const std::byte* bytes) {
  ForEachWeight(outline_, [&](std::string_view name, Tensor& tensor) {
    if (name != role) return;
    if (tensor.rank() == 1) {
      PutVector(role, tensor, first_row, rows, bytes);
    } else {
      ForEachPart(role, tensor, first_row, rows, bytes,
                  [&](auto panels, const WeightView& part, int64_t first_in, int64_t first_out) {
                    (this->*panels).Pack(part, first_in, first_out);
                  });
    }
  });
}

void PackedFeedForward::Get(std::string_view role, int64_t first_row, int64_t rows, std::byte* bytes) const {
  ForEachWeight(outline_, [&](std::string_view name, const Tensor& tensor) {
    if (name != role) return;
    if (tensor.rank() == 1) {
      const size_t size = SizeOf(tensor.dtype());
      std::memcpy(bytes, tensor.data() + static_cast<size_t>(first_row) * size, static_cast<size_t>(rows) * size);
    } else {
      ForEachPart(role, tensor, first_row, rows, bytes,
                  [&](auto panels, const WeightView& part, int64_t first_in, int64_t first_out) {
                    (this->*panels).Unpack(part, first_in, first_out);
                  });
    }
  });
}

void PackedFeedForward::PutVector(std::string_view role, Tensor& tensor, int64_t first, int64_t count,
                                  const std::byte* bytes) {
  const size_t size = SizeOf(tensor.dtype());
  std::memcpy(tensor.mutable_data() + static_cast<size_t>(first) * size, bytes, static_cast<size_t>(count) * size);
  for (int64_t i = first; i < first + count; ++i) {
    const float value = tensor.At(i);
    if (role == "gate_bias") {
      gate_bias_[i] = value;
    } else if (role == "up_bias") {
      up_bias_[i] = value;
    } else if (role == "down_bias") {
      down_bias_[i] = value;
    } else if (role == "inner_norm_gamma") {
      inner_norm_gamma_[i] = value;
    } else if (spec_.packing == GateUpPacking::kInterleaved) {
      (i % 2 == 0 ? gate_bias_ : up_bias_)[i / 2] = value;
    } else {
      (i < extent_.hidden_dim ? gate_bias_ : up_bias_)[i % extent_.hidden_dim] = value;
    }
  }
}

template <typename Visit>
void PackedFeedForward::ForEachPart(std::string_view role, const Tensor& tensor, int64_t first_row, int64_t rows,
                                    const std::byte* bytes, const Visit& visit) const {
  constexpr std::string_view kScale = "_scale";
  const bool is_scale = role.size() > kScale.size() && role.substr(role.size() - kScale.size()) == kScale;
  if (is_scale) role.remove_suffix(kScale.size());
  const bool out_in = spec_.layout == WeightLayout::kOutIn;
  const int64_t width = tensor.dim(1);
  // Rows first, first + every, …, of which there are `count`, and of each `cols` elements from `col` on, `step` apart.
  const auto visit_part = [&](Panels PackedFeedForward::*member, int64_t first, int64_t every, int64_t count,
                              int64_t col, int64_t cols, int64_t step, int64_t to_row) {
    if (count <= 0) return;
    const Panels& panels = this->*member;
    const std::byte* data = bytes + ((first - first_row) * width + col) * static_cast<int64_t>(SizeOf(tensor.dtype()));
    WeightView part = {panels.dtype(), spec_.layout, out_in ? panels.in() : count, out_in ? count : cols,
                       is_scale ? nullptr : data};
    part.step = step;
    if (is_scale) {
      part.scale = data;
      part.scale_stride = every * width;
    } else {
      part.stride = every * width;
    }
    visit(member, part, out_in ? 0 : to_row, out_in ? to_row : 0);
  };
  if (role != "gate_up") {
    using P = PackedFeedForward;
    visit_part(role == "gate" ? &P::gate_
               : role == "up" ? &P::up_
                              : &P::down_,
               first_row, 1, rows, 0, width, 1, first_row);
    return;
  }
  const int64_t h = extent_.hidden_dim, end = first_row + rows;
  const bool interleaved = spec_.packing == GateUpPacking::kInterleaved;
  for (int half = 0; half < 2; ++half) {
    const auto member = half == 0 ? &PackedFeedForward::gate_ : &PackedFeedForward::up_;
    if (!out_in) {
      visit_part(member, first_row, 1, rows, interleaved ? half : half * h, h, interleaved ? 2 : 1, first_row);
    } else if (interleaved) {
      const int64_t first = first_row + (first_row + half) % 2;
      visit_part(member, first, 2, (end - first + 1) / 2, 0, width, 1, first / 2);
    } else {
      const int64_t first = std::max(first_row, half * h);
      visit_part(member, first, 1, std::min(end, (half + 1) * h) - first, 0, width, 1, first - half * h);
    }
  }
}

FeedForwardWeights PackedFeedForward::Unpacked() const {
  FeedForwardWeights weights = outline_;
  ForEachWeight(weights, [&](std::string_view role, Tensor& tensor) {
    if (tensor.rank() == 1) return;
    tensor = Tensor::Allocate(tensor.dtype(), tensor.shape());
    Get(role, 0, tensor.dim(0), tensor.mutable_data());
  });
  return weights;
}

absl::StatusOr<FeedForwardOutputs> FeedForward(const Arena& arena, const PackedFeedForward& layer, const Tensor& input,
                                               std::optional<DType> output_dtype, bool intermediates,
                                               const StillWanted& still_wanted, const MemoryPlace* place) {
  const auto extent = CheckFeedForward(layer.spec(), layer.outline(), input);
  if (!extent.ok()) return extent.status();
  FeedForwardOperands operands = {.inner_norm_gamma = layer.inner_norm_gamma()};
  if (!layer.gate().empty()) operands.gate = {.panels = &layer.gate(), .bias = layer.gate_bias()};
  operands.up = {.panels = &layer.up(), .bias = layer.up_bias()};
  operands.down = {.panels = &layer.down(), .bias = layer.down_bias()};
  return ComputeFeedForward(arena, layer.spec(), *extent, operands, input, output_dtype, intermediates, still_wanted,
                            place);
}

}  // namespace layerd
