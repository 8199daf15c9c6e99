#include "lib/resident/layer_query.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_hash.h"

namespace layerd {
namespace {

constexpr size_t kMaxFilterBytes = 1024;
constexpr size_t kMaxTokenBytes = 1024;
constexpr size_t kQueryHashCharacters = 16;
constexpr int kDefaultPageSize = 100, kMaxPageSize = 1000;

// A term that a filter may have, beside patterns.
struct Term {
  std::string_view text;
  std::optional<bool> feed_forward, uploaded, usable;
  bool prepared = false;
};
constexpr Term kTerms[] = {
    {.text = "kind:normalize", .feed_forward = false}, {.text = "kind:feed_forward", .feed_forward = true},
    {.text = "source:checkpoint", .uploaded = false},  {.text = "source:upload", .uploaded = true},
    {.text = "state:usable", .usable = true},          {.text = "state:unusable", .usable = false},
    {.text = "state:prepared", .prepared = true},
};

bool IsPattern(std::string_view term) {
  return std::all_of(term.begin(), term.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-' || c == '*';
  });
}

// Makes `wanted` what `term` wants; false where it has to be the contrary already.
bool Demand(std::optional<bool> term, std::optional<bool>& wanted) {
  if (!term) return true;
  if (wanted && *wanted != *term) return false;
  wanted = term;
  return true;
}

// What a page token is bound to.
std::string QueryHash(const LayerQuery& query) {
  const std::string text = absl::StrCat(query.model, "\n", query.filter);
  return Sha256Of(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size()))
      .substr(0, kQueryHashCharacters);
}

}  // namespace

bool FitsPattern(std::string_view pattern, std::string_view text) {
  // Where the last * stands, and where what it covers ends: if the rest does not fit, it covers one character more. An
  // earlier * need never cover more.
  size_t star = std::string_view::npos, covered_end = 0;
  size_t p = 0, t = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      covered_end = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++covered_end;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

absl::StatusOr<LayerFilter> LayerFilter::Parse(std::string_view filter) {
  if (filter.size() > kMaxFilterBytes) {
    return InvalidField("filter", "FILTER_TOO_LONG",
                        absl::StrCat("expected at most ", kMaxFilterBytes, " bytes, got ", filter.size()));
  }
  LayerFilter result;
  for (const absl::string_view part :
       absl::StrSplit(absl::string_view(filter.data(), filter.size()), ' ', absl::SkipEmpty())) {
    const std::string_view text(part.data(), part.size());
    const Term* term =
        std::find_if(std::begin(kTerms), std::end(kTerms), [&](const Term& t) { return t.text == text; });
    if (term != std::end(kTerms)) {
      const bool possible = Demand(term->feed_forward, result.feed_forward_) &&
                            Demand(term->uploaded, result.uploaded_) && Demand(term->usable, result.usable_);
      if (!possible) result.nothing_ = true;
      if (term->prepared) result.prepared_ = true;
    } else if (IsPattern(text)) {
      result.patterns_.emplace_back(text);
    } else {
      std::string terms;
      for (const Term& one : kTerms) absl::StrAppend(&terms, std::string(one.text), ", ");
      return InvalidField("filter", "UNKNOWN_TERM",
                          absl::StrCat("expected terms separated by spaces, each ", terms,
                                       "or a pattern of letters, digits, '.', '_', '-' and '*', got ", Quoted(text)));
    }
  }
  return result;
}

bool LayerFilter::Holds(const LayerInfo& info, std::string_view layer, bool prepared) const {
  const bool usable = info.status.ok();
  if (nothing_ || (usable_ && *usable_ != usable) || (uploaded_ && *uploaded_ != info.uploaded)) return false;
  if (feed_forward_ && (!usable || *feed_forward_ != std::holds_alternative<FeedForwardLayer>(info.outline))) {
    return false;
  }
  if (prepared_ && !prepared) return false;
  return std::all_of(patterns_.begin(), patterns_.end(),
                     [layer](const std::string& pattern) { return FitsPattern(pattern, layer); });
}

absl::StatusOr<int> PageSizeOf(const LayerQuery& query) {
  if (query.page_size < 0) {
    return InvalidField("page_size", "OUT_OF_RANGE", absl::StrCat("expected 0 or more, got ", query.page_size));
  }
  return query.page_size == 0 ? kDefaultPageSize : std::min(query.page_size, kMaxPageSize);
}

std::string PageTokenBehind(const LayerQuery& query, std::string_view name) {
  return absl::WebSafeBase64Escape(absl::StrCat(QueryHash(query), std::string(name)));
}

absl::StatusOr<std::string> NameBefore(const LayerQuery& query) {
  if (query.page_token.empty()) return std::string();
  std::string text;
  const bool sound = query.page_token.size() <= kMaxTokenBytes &&
                     absl::WebSafeBase64Unescape(query.page_token, &text) && text.size() > kQueryHashCharacters &&
                     ParseLayerName(std::string_view(text).substr(kQueryHashCharacters)).has_value();
  if (!sound) {
    return InvalidField("page_token", "BAD_PAGE_TOKEN",
                        absl::StrCat("expected nothing, or what the page before gave, got ", Quoted(query.page_token)));
  }
  if (std::string_view(text).substr(0, kQueryHashCharacters) != QueryHash(query)) {
    return InvalidField("page_token", "BAD_PAGE_TOKEN",
                        "expected the token of a page with the same model and filter, got that of another list");
  }
  return text.substr(kQueryHashCharacters);
}

}  // namespace layerd
