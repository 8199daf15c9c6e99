// The records of a layer store as LayerRecords, read again whenever their files have changed.
#ifndef LAYERD_LIB_RESIDENT_RECORD_CACHE_H_
#define LAYERD_LIB_RESIDENT_RECORD_CACHE_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "lib/resident/store_files.h"
#include "lib/resident/store_record.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/layer_record.h"

namespace layerd {

// What one record file says. It keeps no file open. Threads: any.
class StoredRecord : public LayerRecord {
 public:
  StoredRecord(std::shared_ptr<const StoreFiles> files, LayerName name, const RecordStamp& stamp, StoredLayer layer)
      : files_(std::move(files)), name_(std::move(name)), stamp_(stamp), layer_(std::move(layer)) {}

  const LayerInfo& info() const override { return layer_.info; }
  const RecordStamp& stamp() const { return stamp_; }
  absl::StatusOr<std::unique_ptr<LayerReader>> Open() const override;

 private:
  const std::shared_ptr<const StoreFiles> files_;
  const LayerName name_;
  const RecordStamp stamp_;
  const StoredLayer layer_;
};

// Threads: any.
class RecordCache {
 public:
  using Record = std::shared_ptr<const StoredRecord>;

  explicit RecordCache(std::shared_ptr<const StoreFiles> files) : files_(std::move(files)) {}

  // The record as it is now: null where there is none, and the same object as long as the file is the same. Errors: those
  // of StoreFiles.
  absl::StatusOr<Record> Get(const LayerName& name);

  struct Listing {
    std::vector<Record> records;  // ordered by name; info().status tells of one that could not be looked at
    bool complete = true;         // false where there may be more
  };
  Listing All();

 private:
  const std::shared_ptr<const StoreFiles> files_;
  std::mutex mutex_;
  std::map<std::string, Record> known_;  // by full name
};

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_RECORD_CACHE_H_
