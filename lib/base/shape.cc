#include "lib/base/shape.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lib/base/errors.h"

namespace layerd {

std::string ToString(absl::Span<const int64_t> shape) {
  constexpr size_t kShown = 16;
  if (shape.size() > kShown) {
    return absl::StrCat("[", absl::StrJoin(shape.subspan(0, kShown), ", "), ", … ", shape.size(), " dimensions]");
  }
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> NumElements(absl::Span<const int64_t> shape) {
  if (shape.size() > kMaxRank) {
    return InvalidField("", "RANK_TOO_LARGE",
                        absl::StrCat("expected at most ", kMaxRank, " dimensions, got ", shape.size()));
  }
  // Every dimension is judged before any product, so that [0, -1] is as wrong as [-1].
  for (const int64_t dimension : shape) {
    if (dimension < 0) {
      return InvalidField("", "NEGATIVE_DIMENSION",
                          absl::StrCat("expected dimensions of 0 or more, got ", ToString(shape)));
    }
    if (dimension > kMaxDimension) {
      return InvalidField("", "DIMENSION_TOO_LARGE",
                          absl::StrCat("expected dimensions of at most ", kMaxDimension, ", got ", ToString(shape)));
    }
  }
  int64_t product = 1;
  bool empty = false;
  for (const int64_t dimension : shape) {
    if (dimension == 0) {
      empty = true;
    } else if (product > kMaxElements / dimension) {
      return InvalidField(
          "", "SHAPE_OVERFLOW",
          absl::StrCat("expected at most ", kMaxElements, " elements, got the shape ", ToString(shape)));
    } else {
      product *= dimension;
    }
  }
  return empty ? 0 : product;
}

}  // namespace layerd
