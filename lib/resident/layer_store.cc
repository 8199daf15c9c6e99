#include "lib/resident/layer_store.h"

#include <algorithm>
#include <new>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/resident/record_cache.h"
#include "lib/resident/store_files.h"
#include "lib/resident/store_record.h"
#include "lib/resident/upload_reader.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_hash.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

using Record = RecordCache::Record;

// Hashed twice and written while a cache of the CPU still has it.
constexpr size_t kBlockBytes = size_t{1} << 18;

absl::StatusOr<LayerName> CheckHeader(const UploadHeader& header) {
  auto name = ParseLayerName(header.name);
  if (!name) {
    return InvalidField(
        "header.name", "LAYER_NAME",
        absl::StrCat("expected models/{model}/layers/{layer}, each of the two with 1 to ", kMaxNamePartBytes,
                     " letters, digits, '.', '_' and '-', and no '.' at its beginning, got ", Quoted(header.name)));
  }
  if (header.size_bytes < kMinUploadBytes || header.size_bytes > kMaxUploadBytes) {
    return InvalidField("header.size_bytes", "OUT_OF_RANGE",
                        absl::StrCat("expected the size of a safetensors file, ", kMinUploadBytes, " to ",
                                     kMaxUploadBytes, " bytes, got ", header.size_bytes));
  }
  if (!IsSha256(header.sha256)) {
    return InvalidField("header.sha256", "SHA256",
                        absl::StrCat("expected 64 hexadecimal digits in lower case, got ", Quoted(header.sha256)));
  }
  if (auto status = CheckOptions(header.layer); !status.ok()) return status;
  return *std::move(name);
}

// Whether the upload would be the layer that is there.
bool IsSame(const UploadHeader& header, const LayerInfo& info) {
  const auto no_weight = [](std::string_view) { return std::string(); };
  return info.status.ok() && info.weights_sha256 == header.sha256 &&
         CanonicalText(OptionsOf(info.outline), no_weight) == CanonicalText(OptionsOf(header.layer), no_weight);
}

// Whether `layer` tells an error of quantising that `old` does not.
bool TellsMore(const Layer& layer, const Layer& old) {
  const auto* one = std::get_if<FeedForwardLayer>(&layer);
  const auto* other = std::get_if<FeedForwardLayer>(&old);
  return one != nullptr && other != nullptr && one->quantization && one->quantization != other->quantization;
}

absl::Status CheckEtag(std::string_view field, const std::string& etag, const Record& record) {
  const bool damaged = record != nullptr && !record->info().status.ok();
  if (record != nullptr && !damaged && record->info().content_hash == etag) return absl::OkStatus();
  ErrorDetails details;
  details.reason = "ETAG_MISMATCH";
  details.field = std::string(field);
  const std::string expected = record == nullptr ? "none, since there is no layer of that name"
                               : damaged         ? "none, since the layer is damaged"
                                                 : absl::StrCat(record->info().content_hash, ", that of the layer now");
  return WithDetails(absl::StatusCode::kAborted,
                     absl::StrCat(details.field, ": expected ", expected, ", got ", Quoted(etag)), details);
}

// Whether the upload may have its name, where `record` has it now.
absl::Status CheckReplacement(const UploadHeader& header, const Record& record) {
  if (header.etag) return CheckEtag("header.etag", *header.etag, record);
  if (record == nullptr || IsSame(header, record->info())) return absl::OkStatus();
  ErrorDetails details;
  details.reason = "LAYER_EXISTS";
  details.field = "header.name";
  details.resource_type = "layer";
  details.resource_name = header.name;
  return WithDetails(absl::StatusCode::kAlreadyExists,
                     absl::StrCat("header.name: ",
                                  record->info().status.ok() ? "another layer has this name; replace it with its etag"
                                                             : "a damaged layer has this name; delete it first",
                                  ": ", Quoted(header.name)),
                     details);
}

}  // namespace

struct LayerStore::Impl {
  Impl(std::shared_ptr<StoreFiles> all_files, const LayerStoreOptions& all_options)
      : files(std::move(all_files)), options(all_options), records(files) {}

  class UploadImpl;

  // Gives an upload, all of whose bytes are on the disk, its name.
  absl::StatusOr<Record> Publish(const UploadHeader& header, const LayerName& name, UploadFile& file,
                                 StoredLayer layer);

  // Removes what belongs to nothing.
  void Clear(const StoreFiles::Lock& lock) {
    files->RemoveDeadUploads(lock);
    files->RemoveEmptyModels(lock);
    const RecordCache::Listing listing = records.All();
    bool all_known = listing.complete;
    std::set<std::string> named;
    for (const Record& record : listing.records) {
      all_known = all_known && record->info().status.ok();
      named.insert(record->info().weights_sha256);
    }
    // A record that cannot be read may name any weights.
    if (all_known) files->RemoveWeightsBut(lock, named);
  }

  const std::shared_ptr<StoreFiles> files;
  const LayerStoreOptions options;
  RecordCache records;
};

absl::StatusOr<Record> LayerStore::Impl::Publish(const UploadHeader& header, const LayerName& name, UploadFile& file,
                                                 StoredLayer layer) {
  const auto lock = files->Acquire();
  if (!lock.ok()) return lock.status();
  const auto old = records.Get(name);
  if (!old.ok()) return old.status();
  if (auto status = CheckReplacement(header, *old); !status.ok()) return status;
  const bool same =
      *old != nullptr && IsSame(header, (*old)->info()) && !TellsMore(layer.info.outline, (*old)->info().outline);
  // Weights that are there already are replaced by their equals, in case the disk has spoilt them.
  absl::Status status = files->MakeWeights(*lock, file, layer.info.weights_sha256);
  if (status.ok() && !same) {
    layer.info.name = header.name;
    layer.info.create_time = absl::Now();
    status = files->WriteRecord(*lock, name, RecordText(layer));
  }
  if (!status.ok() || (*old != nullptr && !same)) Clear(*lock);
  if (!status.ok()) return status;
  auto record = records.Get(name);
  if (record.ok() && *record == nullptr) return InternalError("the layer store: a new record is not there");
  return record;
}

class LayerStore::Impl::UploadImpl : public LayerStore::Upload {
 public:
  UploadImpl(std::shared_ptr<Impl> store, const UploadHeader& header, LayerName name, std::unique_ptr<UploadFile> file)
      : store_(std::move(store)),
        header_(header),
        name_(std::move(name)),
        file_(std::move(file)),
        reader_(OptionsOf(header.layer), header.size_bytes) {}

  absl::Status Write(absl::Span<const std::byte> bytes) override {
    if (!status_.ok()) return status_;
    try {
      for (; status_.ok() && !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), kBlockBytes))) {
        status_ = reader_.Take(bytes.subspan(0, kBlockBytes));
        if (status_.ok()) status_ = file_->Append(bytes.subspan(0, kBlockBytes));
      }
    } catch (const std::bad_alloc&) {
      status_ = OutOfMemory();
    }
    if (!status_.ok()) file_.reset();
    return status_;
  }

  absl::StatusOr<std::shared_ptr<const LayerRecord>> Commit() override {
    if (!status_.ok()) return status_;
    auto record = Finish();
    status_ = record.ok() ? InternalError("an upload was used after its end") : record.status();
    file_.reset();
    return record;
  }

 private:
  absl::StatusOr<Record> Finish() {
    auto layer = reader_.Finish();
    if (!layer.ok()) return layer.status();
    if (layer->info.weights_sha256 != header_.sha256) {
      return InvalidField("header.sha256", "SHA256_MISMATCH",
                          absl::StrCat("expected bytes of the SHA-256 ", header_.sha256, ", got bytes of ",
                                       layer->info.weights_sha256));
    }
    if (auto status = file_->Sync(); !status.ok()) return status;
    return store_->Publish(header_, name_, *file_, *std::move(layer));
  }

  const std::shared_ptr<Impl> store_;
  const UploadHeader header_;
  const LayerName name_;
  std::unique_ptr<UploadFile> file_;  // null after the end
  UploadReader reader_;
  absl::Status status_;
};

LayerStore::LayerStore(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
LayerStore::~LayerStore() = default;

absl::StatusOr<std::unique_ptr<LayerStore>> LayerStore::Open(const std::string& folder,
                                                             const LayerStoreOptions& options) {
  auto files = StoreFiles::Open(folder);
  if (!files.ok()) return files.status();
  auto impl = std::make_shared<Impl>(*std::move(files), options);
  const auto lock = impl->files->Acquire();
  if (!lock.ok()) return lock.status();
  impl->Clear(*lock);
  return std::unique_ptr<LayerStore>(new LayerStore(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<LayerStore::Upload>> LayerStore::Begin(const UploadHeader& header) {
  auto name = CheckHeader(header);
  if (!name.ok()) return name.status();
  const auto lock = impl_->files->Acquire();
  if (!lock.ok()) return lock.status();
  const auto record = impl_->records.Get(*name);
  if (!record.ok()) return record.status();
  if (auto status = CheckReplacement(header, *record); !status.ok()) return status;
  impl_->files->RemoveDeadUploads(*lock);
  const auto used = impl_->files->UsedBytes(*lock);
  if (!used.ok()) return used.status();
  const int64_t left = std::max<int64_t>(impl_->options.max_bytes - *used, 0);
  if (header.size_bytes > left) {
    return TooLarge("header.size_bytes", "STORE_FULL",
                    absl::StrCat("expected at most ", left,
                                 " bytes, which the store has left (--layer_store_mib), got ", header.size_bytes));
  }
  auto file = impl_->files->CreateUpload(*lock, header.size_bytes);
  if (!file.ok()) return file.status();
  return std::make_unique<Impl::UploadImpl>(impl_, header, *std::move(name), *std::move(file));
}

absl::Status LayerStore::Delete(std::string_view name, const std::optional<std::string>& etag) {
  const auto parsed = ParseLayerName(name);
  if (!parsed) return LayerNotFound("name", name);
  const auto lock = impl_->files->Acquire();
  if (!lock.ok()) return lock.status();
  const auto record = impl_->records.Get(*parsed);
  if (!record.ok()) return record.status();
  if (*record == nullptr) return LayerNotFound("name", name);
  if (etag) {
    if (auto status = CheckEtag("etag", *etag, *record); !status.ok()) return status;
  }
  auto status = impl_->files->RemoveRecord(*lock, *parsed);
  impl_->Clear(*lock);
  return status;
}

absl::StatusOr<std::shared_ptr<const LayerRecord>> LayerStore::Find(std::string_view name) {
  const auto parsed = ParseLayerName(name);
  if (!parsed) return LayerNotFound("name", name);
  auto record = impl_->records.Get(*parsed);
  if (!record.ok()) return record.status();
  if (*record == nullptr) return LayerNotFound("name", name);
  return *std::move(record);
}

std::vector<std::shared_ptr<const LayerRecord>> LayerStore::List() {
  RecordCache::Listing listing = impl_->records.All();
  return {listing.records.begin(), listing.records.end()};
}

std::string LayerStore::WarningOf(std::string_view model) {
  const auto status = impl_->files->CheckModel(std::string(model));
  return std::string(status.message());
}

}  // namespace layerd
