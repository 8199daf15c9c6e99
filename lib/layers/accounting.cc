#include "lib/layers/accounting.h"

#include <limits>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"

namespace layerd {
namespace {

absl::Status CheckSize(std::string_view field, int64_t size) {
  if (size >= 1 && size <= kMaxDimension) return absl::OkStatus();
  return InvalidField(field, "OUT_OF_RANGE", absl::StrCat("expected 1 to ", kMaxDimension, ", got ", size));
}

}  // namespace

absl::StatusOr<int64_t> GatedHiddenDim(int64_t dim, int64_t multiple_of) {
  if (auto status = CheckSize("dim", dim); !status.ok()) return status;
  if (auto status = CheckSize("multiple_of", multiple_of); !status.ok()) return status;
  const int64_t hidden = 8 * dim / 3;
  return (hidden + multiple_of - 1) / multiple_of * multiple_of;
}

absl::StatusOr<FeedForwardCost> CostOf(FeedForwardForm form, int64_t dim, int64_t hidden_dim, bool biases,
                                       DType weight_dtype, DType activation_dtype) {
  if (auto status = CheckSize("dim", dim); !status.ok()) return status;
  if (auto status = CheckSize("hidden_dim", hidden_dim); !status.ok()) return status;
  const int64_t matrices = form == FeedForwardForm::kGated ? 3 : 2;
  // dim · hidden_dim is below 2⁶²; the largest figure below is at most 12 times it plus small change.
  if (dim > std::numeric_limits<int64_t>::max() / 16 / hidden_dim) {
    return InvalidField("hidden_dim", "OUT_OF_RANGE",
                        absl::StrCat("expected dim · hidden_dim of at most ", std::numeric_limits<int64_t>::max() / 16,
                                     ", got ", dim, " · ", hidden_dim));
  }
  FeedForwardCost cost;
  const int64_t weights = matrices * dim * hidden_dim;
  const int64_t all_biases = biases ? (matrices - 1) * hidden_dim + dim : 0;
  cost.parameters = weights + all_biases;
  cost.flops_per_row = 2 * weights;
  cost.weight_bytes = weights * static_cast<int64_t>(SizeOf(weight_dtype));
  if (weight_dtype == DType::kInt8) {
    const auto scales = [](int64_t in, int64_t out) { return out * ((in + kScaleBlock - 1) / kScaleBlock); };
    const int64_t all_scales = (matrices - 1) * scales(dim, hidden_dim) + scales(hidden_dim, dim);
    cost.weight_bytes += all_scales * static_cast<int64_t>(SizeOf(DType::kFloat16));
  }
  const DType bias_dtype = IsFloat(weight_dtype) ? weight_dtype : DType::kFloat32;
  cost.weight_bytes += all_biases * static_cast<int64_t>(SizeOf(bias_dtype));
  cost.activation_bytes_per_row = 2 * dim * static_cast<int64_t>(SizeOf(activation_dtype));
  return cost;
}

}  // namespace layerd
