// How a list of layers is asked for: filters, pages, and patterns of names.
//
// Threads: pure functions; const methods from any number of threads.
#ifndef LAYERD_LIB_RESIDENT_LAYER_QUERY_H_
#define LAYERD_LIB_RESIDENT_LAYER_QUERY_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/layer_record.h"

namespace layerd {

// Which layers LayerLibrary::List() gives: all terms of `filter`, separated by spaces, must hold. A term is
// `kind:normalize`, `kind:feed_forward` (neither holds for a layer that cannot be used), `source:checkpoint`,
// `source:upload`, `state:usable`, `state:unusable`, `state:prepared`, or a pattern that the layer's own name fits, with *
// for any number of characters.
struct LayerQuery {
  std::string model;       // its own name; empty: all
  std::string filter;      // empty: all
  int page_size = 0;       // 0: 100; at most 1000, more count as 1000
  std::string page_token;  // what the page before gave for this model and filter; empty: the first page
};

// Whether all of `text` fits `pattern`, in which * stands for any number of characters and all else for itself.
bool FitsPattern(std::string_view pattern, std::string_view text);

// A filter, understood.
class LayerFilter {
 public:
  // INVALID_ARGUMENT, field "filter", for a term that is none of the above, or a filter of more than 1024 bytes.
  static absl::StatusOr<LayerFilter> Parse(std::string_view filter);

  // `layer` is the layer's own name.
  bool Holds(const LayerInfo& info, std::string_view layer, bool prepared) const;

 private:
  std::optional<bool> feed_forward_;
  std::optional<bool> uploaded_;
  std::optional<bool> usable_;
  bool prepared_ = false;  // only such
  bool nothing_ = false;   // terms contradict each other
  std::vector<std::string> patterns_;
};

// 1 to 1000. INVALID_ARGUMENT, field "page_size", where it is negative.
absl::StatusOr<int> PageSizeOf(const LayerQuery& query);

// A page token stands for the place behind a name, in the list that a model and a filter give.
std::string PageTokenBehind(const LayerQuery& query, std::string_view name);
// That name; empty for the first page. INVALID_ARGUMENT, field "page_token", for a token that PageTokenBehind() did not
// make for this model and filter.
absl::StatusOr<std::string> NameBefore(const LayerQuery& query);

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_QUERY_H_
