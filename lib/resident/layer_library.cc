#include "lib/resident/layer_library.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

// How often a layer is looked for again because the version that was found is gone when it is read.
constexpr int kTries = 5;
constexpr int64_t kReplacedRetryDelayMs = 100;

bool FitsAny(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(), [name](const auto& one) { return FitsPattern(one, name); });
}

// What a record says of itself, as an error of the call's field "layer".
absl::Status OfLayer(const absl::Status& status) {
  ErrorDetails details = DetailsOf(status);
  const bool is_said = details.field == "layer";
  details.field = "layer";
  return WithDetails(status.code(), absl::StrCat(is_said ? "" : "layer: ", status.message()), details);
}

// Whether the error is one of the moment, and not of the layer.
bool IsPassing(const absl::Status& status) {
  return status.code() == absl::StatusCode::kDeadlineExceeded || status.code() == absl::StatusCode::kUnavailable ||
         status.code() == absl::StatusCode::kResourceExhausted;
}

}  // namespace

LayerLibrary::LayerLibrary(std::vector<LayerCatalog*> catalogs, const LayerLibraryOptions& options)
    : catalogs_(std::move(catalogs)),
      options_(options),
      prepared_({.memory_bytes = options.memory_bytes,
                 .threads = options.loading_threads,
                 .waiting_calls = options.waiting_calls,
                 .memory_wait = options.memory_wait,
                 .on_event = options.on_event}) {}

absl::StatusOr<LayerLibrary::Found> LayerLibrary::Find(std::string_view field, std::string_view name) {
  for (LayerCatalog* catalog : catalogs_) {
    auto record = catalog->Find(name);
    if (record.ok()) return Found{*std::move(record), catalog};
    if (record.status().code() != absl::StatusCode::kNotFound) return record.status();
  }
  return LayerNotFound(field, name);
}

void LayerLibrary::Acquire(std::string_view name, absl::Time deadline, PreparedLayerDone done) {
  Acquire(name, deadline, std::move(done), kTries);
}

void LayerLibrary::Acquire(std::string_view name, absl::Time deadline, PreparedLayerDone done, int tries_left) {
  const auto found = Find("layer", name);
  if (!found.ok()) {
    if (found.status().code() == absl::StatusCode::kNotFound) prepared_.DropOthers(name, nullptr);
    return done(found.status());
  }
  const auto& record = found->record;
  if (auto prepared = prepared_.Find(record)) return done(std::move(prepared));
  if (!record->info().status.ok()) {
    prepared_.DropOthers(name, nullptr);
    return done(OfLayer(record->info().status));
  }
  prepared_.Prepare(
      record, FitsAny(options_.pinned, name), deadline,
      [this, name = std::string(name), deadline, done = std::move(done),
       tries_left](absl::StatusOr<std::shared_ptr<const PreparedLayer>> prepared) mutable {
        if (prepared.ok() || IsPassing(prepared.status())) return done(std::move(prepared));
        if (prepared.status().code() != absl::StatusCode::kNotFound) return done(OfLayer(prepared.status()));
        // This version is gone: another may have come in its place.
        if (tries_left > 1) return Acquire(name, deadline, std::move(done), tries_left - 1);
        done(Overloaded("busy: the layer is replaced again and again while it is read", kReplacedRetryDelayMs));
      });
}

void LayerLibrary::Preload() {
  for (const std::string& name : prepared_.Names()) {
    const auto found = Find("layer", name);
    if (found.ok()) {
      prepared_.DropOthers(name, found->record);
    } else if (found.status().code() == absl::StatusCode::kNotFound) {
      prepared_.DropOthers(name, nullptr);
    }
  }
  if (options_.pinned.empty() && options_.preloaded.empty()) return;
  const std::vector<Found> layers = FindAll();
  // Pinned ones first: the others have what room they leave.
  for (const bool pinned : {true, false}) {
    for (const Found& found : layers) {
      const LayerInfo& info = found.record->info();
      if (FitsAny(options_.pinned, info.name) != pinned) continue;
      if (!pinned && !FitsAny(options_.preloaded, info.name)) continue;
      if (info.status.ok()) {
        prepared_.PrepareAhead(found.record, pinned);
      } else if (options_.on_event) {
        options_.on_event({.name = info.name, .status = info.status, .ahead = true});
      }
    }
  }
}

std::vector<LayerLibrary::Found> LayerLibrary::FindAll() {
  std::vector<Found> all;
  for (LayerCatalog* catalog : catalogs_) {
    for (auto& record : catalog->List()) all.push_back({std::move(record), catalog});
  }
  const auto name = [](const Found& found) -> const std::string& { return found.record->info().name; };
  // Stable, so that of two with one name the first catalogue's is the first.
  std::stable_sort(all.begin(), all.end(), [&](const Found& a, const Found& b) { return name(a) < name(b); });
  all.erase(std::unique(all.begin(), all.end(), [&](const Found& a, const Found& b) { return name(a) == name(b); }),
            all.end());
  return all;
}

LayerListing LayerLibrary::ListingOf(const Found& found) {
  LayerListing listing;
  listing.info = found.record->info();
  const PreparedLayers::Known known = prepared_.KnownOf(found.record);
  if (listing.info.content_hash.empty()) listing.info.content_hash = known.content_hash;
  listing.prepared = known.prepared;
  listing.pinned = FitsAny(options_.pinned, listing.info.name);
  if (const auto name = ParseLayerName(listing.info.name)) listing.warning = found.catalog->WarningOf(name->model);
  return listing;
}

absl::StatusOr<LayerListing> LayerLibrary::Get(std::string_view name) {
  const auto found = Find("name", name);
  if (!found.ok()) return found.status();
  return ListingOf(*found);
}

absl::StatusOr<LayerPage> LayerLibrary::List(const LayerQuery& query) {
  const auto filter = LayerFilter::Parse(query.filter);
  if (!filter.ok()) return filter.status();
  const auto page_size = PageSizeOf(query);
  if (!page_size.ok()) return page_size.status();
  const auto before = NameBefore(query);
  if (!before.ok()) return before.status();
  LayerPage page;
  for (const Found& found : FindAll()) {
    const LayerInfo& info = found.record->info();
    if (info.name <= *before) continue;
    const auto name = ParseLayerName(info.name);
    if (!name || (!query.model.empty() && name->model != query.model)) continue;
    if (!filter->Holds(info, name->layer, prepared_.KnownOf(found.record).prepared)) continue;
    if (static_cast<int>(page.layers.size()) == *page_size) {
      page.next_page_token = PageTokenBehind(query, page.layers.back().info.name);
      break;
    }
    page.layers.push_back(ListingOf(found));
  }
  return page;
}

absl::StatusOr<std::shared_ptr<const PreparedLayer>> Acquire(LayerSource& source, std::string_view name,
                                                             absl::Time deadline) {
  std::mutex mutex;
  std::condition_variable ready;
  std::optional<absl::StatusOr<std::shared_ptr<const PreparedLayer>>> answer;
  source.Acquire(name, deadline, [&](absl::StatusOr<std::shared_ptr<const PreparedLayer>> layer) {
    // Notified under the lock: all three may be gone as soon as it is free.
    std::lock_guard<std::mutex> lock(mutex);
    answer = std::move(layer);
    ready.notify_one();
  });
  std::unique_lock<std::mutex> lock(mutex);
  ready.wait(lock, [&] { return answer.has_value(); });
  return *std::move(answer);
}

}  // namespace layerd
