// All resident layers, and the memory of those that are in use: what a server knows layers by.
//
// A layer is prepared, that is read, hashed and kept in memory, when it is first used, or at the start where it is pinned
// or preloaded. What prepared layers take is bounded: to make room, the one used longest ago goes first, pinned ones
// never. A layer that a call still uses stays in memory, and counts, until the call is done. Several calls for one layer
// that is not prepared wait for one preparation.
#ifndef LAYERD_LIB_RESIDENT_LAYER_LIBRARY_H_
#define LAYERD_LIB_RESIDENT_LAYER_LIBRARY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lib/resident/layer_query.h"
#include "lib/resident/layer_source.h"
#include "lib/resident/prepared_layers.h"
#include "lib/weights/layer_record.h"

namespace layerd {

struct LayerLibraryOptions {
  int64_t memory_bytes = int64_t{4} << 30;  // of prepared layers
  int loading_threads = 1;
  int waiting_calls = 1024;  // that may wait for layers to be prepared; more are refused
  // How long a preparation waits for memory that calls use, at most.
  absl::Duration memory_wait = absl::Seconds(5);
  // Full names of layers, in which * stands for any number of characters.
  std::vector<std::string> pinned;     // prepared by Preload(), and never evicted
  std::vector<std::string> preloaded;  // prepared by Preload() as far as there is room
  // After each preparation, and for each pinned or preloaded layer that Preload() finds unusable; may be null. Called
  // from any thread, from several at once.
  std::function<void(const PreparationEvent&)> on_event;
};

// A layer as the registry shows it.
struct LayerListing {
  LayerInfo info;  // with its content hash, where the layer was prepared once
  bool prepared = false;
  bool pinned = false;
  std::string warning;  // for example that newer files of its model cannot be used
};

struct LayerPage {
  std::vector<LayerListing> layers;
  std::string next_page_token;  // empty: this is the last one
};

// Threads: any. The catalogues must outlive it. The destructor waits for preparations under way; other calls that wait
// are answered UNAVAILABLE.
class LayerLibrary : public LayerSource {
 public:
  // Asks `catalogs` in this order; the first that has a name answers for it.
  LayerLibrary(std::vector<LayerCatalog*> catalogs, const LayerLibraryOptions& options);

  void Acquire(std::string_view name, absl::Time deadline, PreparedLayerDone done) override;

  // Prepares what is pinned and preloaded and is not prepared yet, on its own threads, and frees the memory of layers
  // that are gone or were replaced; to be called again when layers may have come or gone. `on_event` tells what fails.
  void Preload();

  // NOT_FOUND, field "name".
  absl::StatusOr<LayerListing> Get(std::string_view name);
  // INVALID_ARGUMENT, field "filter", "page_size" or "page_token". A page token stands for a place between names: layers
  // that come and go do not move it.
  absl::StatusOr<LayerPage> List(const LayerQuery& query);

  PreparedLayersStats stats() const { return prepared_.stats(); }

 private:
  // A record, and the catalogue that has it.
  struct Found {
    std::shared_ptr<const LayerRecord> record;
    LayerCatalog* catalog;
  };
  absl::StatusOr<Found> Find(std::string_view field, std::string_view name);
  // All layers, ordered by name, each once.
  std::vector<Found> FindAll();
  void Acquire(std::string_view name, absl::Time deadline, PreparedLayerDone done, int tries_left);
  LayerListing ListingOf(const Found& found);

  const std::vector<LayerCatalog*> catalogs_;
  const LayerLibraryOptions options_;
  PreparedLayers prepared_;  // last: it calls the rest
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_LIBRARY_H_
