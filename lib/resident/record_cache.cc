#include "lib/resident/record_cache.h"

#include <utility>

#include "lib/base/errors.h"

namespace layerd {

absl::StatusOr<std::unique_ptr<LayerReader>> StoredRecord::Open() const {
  if (!info().status.ok()) return info().status;
  auto file = files_->OpenWeights(info().weights_sha256);
  if (!file.ok()) return file.status();
  if (!file->is_open()) {
    // Weights are there before the record that names them, and until after it.
    const auto now = files_->StampOf(name_);
    if (!now.ok()) return now.status();
    if (*now != stamp_) return LayerNotFound("name", info().name);
    return LayerDamaged(info().name, "the file of its weights is gone");
  }
  return StoreReader::Open(layer_, *std::move(file));
}

absl::StatusOr<RecordCache::Record> RecordCache::Get(const LayerName& name) {
  const auto stamp = files_->StampOf(name);
  if (!stamp.ok()) return stamp.status();
  const std::string full = name.Full();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = known_.find(full);
  if (known == known_.end() && !*stamp) return nullptr;
  if (known != known_.end() && *stamp == known->second->stamp()) return known->second;
  // The file is looked at again under the mutex, so that what is kept never goes back to an older one.
  const auto file = files_->ReadRecord(name);
  if (!file.ok()) return file.status();
  if (!*file) {
    known_.erase(full);
    return nullptr;
  }
  if (known != known_.end() && (*file)->stamp == known->second->stamp()) return known->second;
  Record record = std::make_shared<StoredRecord>(files_, name, (*file)->stamp, ParseRecord(name, (*file)->text));
  known_[full] = record;
  return record;
}

RecordCache::Listing RecordCache::All() {
  Listing listing;
  std::vector<LayerName> names;
  listing.complete = files_->ListRecords(names).ok();
  std::map<std::string, Record> all;
  for (const LayerName& name : names) {
    auto record = Get(name);
    if (!record.ok()) {
      StoredLayer unreadable;
      unreadable.info.name = name.Full();
      unreadable.info.uploaded = true;
      unreadable.info.status = record.status();
      record = std::make_shared<StoredRecord>(files_, name, RecordStamp(), std::move(unreadable));
    }
    if (*record != nullptr) all.emplace(name.Full(), *std::move(record));
  }
  // Those that are gone are let go of.
  std::vector<std::string> gone;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [name, record] : known_) {
      if (all.count(name) == 0) gone.push_back(name);
    }
  }
  for (const std::string& name : gone) (void)Get(*ParseLayerName(name));

  listing.records.reserve(all.size());
  for (auto& [name, record] : all) listing.records.push_back(std::move(record));
  return listing;
}

}  // namespace layerd
