#include "server/layer_registry_service.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/resident/layer_bytes.h"
#include "server/deadline.h"
#include "server/log.h"
#include "server/worker_call.h"
#include "wire/layer_codec.h"
#include "wire/message_codec.h"

namespace layerd {
namespace {

// Uploads that may be under way at once: each holds a file and up to one message.
constexpr size_t kMaxUploads = 64;
// Bytes of a download's messages: what is taken out of panels, and copied, within 50 µs.
constexpr size_t kDownloadChunkBytes = size_t{64} << 10;
// What a chunk's message has beside the chunk.
constexpr int64_t kFrameBytes = 64;

// Faults of the store's folder or disk are told to whoever runs the server, too.
absl::Status Told(absl::Status status) {
  const std::string reason = DetailsOf(status).reason;
  if (status.code() == absl::StatusCode::kInternal || reason == "DISK_FULL") {
    LogSeldom(LogLevel::kError, "layer_store_fault", reason, std::string(status.message()));
  }
  return status;
}

absl::Status NoName() { return MissingField("name", "expected models/{model}/layers/{layer}, got nothing"); }

std::string NameOf(const char* method) {
  return absl::StrCat("/", v1::LayerRegistry::service_full_name(), "/", method);
}

}  // namespace

LayerRegistryService::LayerRegistryService(LayerRegistry& registry, CallGate& gate,
                                           const LayerRegistryServiceOptions& options)
    : registry_(registry),
      gate_(gate),
      options_(options),
      workers_(options.threads, options.queue_calls, "--queue_calls"),
      upload_watcher_([this] { WatchUploads(); }) {}

LayerRegistryService::~LayerRegistryService() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  upload_watcher_.join();
}

template <typename Request, typename Handle>
void LayerRegistryService::Serve(CallLoop& loop, const char* method, Handle handle) {
  const ServeBytes serve = [serve = ServeMessages<Request>(options_.max_message_bytes, std::move(handle))](
                               grpc::ByteBuffer& request, grpc::ByteBuffer& answer) {
    return Told(serve(request, answer));
  };
  loop.Serve(NameOf(method), [this, serve](std::unique_ptr<CallArrival> arrival) {
    return NewWorkerCall(std::move(arrival), gate_, workers_, serve);
  });
}

absl::StatusOr<v1::Layer> LayerRegistryService::GetLayer(const v1::GetLayerRequest& message) {
  if (message.name().empty()) return NoName();
  const auto listing = registry_.library().Get(message.name());
  if (!listing.ok()) return listing.status();
  v1::Layer layer;
  wire::EncodeListing(*listing, layer);
  return layer;
}

absl::StatusOr<v1::ListLayersResponse> LayerRegistryService::ListLayers(const v1::ListLayersRequest& message) {
  const auto query = wire::DecodeQuery(message);
  if (!query.ok()) return query.status();
  const auto page = registry_.library().List(*query);
  if (!page.ok()) return page.status();
  v1::ListLayersResponse answer;
  for (const LayerListing& listing : page->layers) wire::EncodeListing(listing, *answer.add_layers());
  answer.set_next_page_token(page->next_page_token);
  return answer;
}

absl::StatusOr<google::protobuf::Empty> LayerRegistryService::DeleteLayer(const v1::DeleteLayerRequest& message) {
  if (message.name().empty()) return NoName();
  const auto etag = message.etag().empty() ? std::nullopt : std::optional(message.etag());
  if (auto status = registry_.Delete(message.name(), etag); !status.ok()) return status;
  registry_.library().Preload();  // frees its memory
  Log(LogLevel::kInfo, "layer_deleted", {{"layer", message.name()}});
  return google::protobuf::Empty();
}

// One CreateLayer call. Its methods run one after the other, on the loop's threads and on workers in turn.
class LayerRegistryService::Upload final : public ServerCall {
 public:
  Upload(LayerRegistryService& service, std::unique_ptr<CallArrival> arrival)
      : ServerCall(std::move(arrival)), service_(service) {
    absl::Status status = entered_ = service_.gate_.Enter();
    {
      std::lock_guard<std::mutex> lock(service_.mutex_);
      service_.uploads_.insert(this);
      if (status.ok() && service_.uploads_.size() > kMaxUploads) {
        status = Overloaded(absl::StrCat("busy: ", kMaxUploads, " uploads are under way"), 1000);
      }
    }
    Continue(status);
  }

  void OnReadDone(bool ok) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reading_ = false;
      // Ended as idle: this object may be gone when this method has returned.
      if (finished_) return;
    }
    const auto status = service_.workers_.Submit([this, ok] {
      const absl::Status taken = Guarded([&] { return ok ? TakeMessage() : End(); });
      message_.Clear();
      if (!ok || !taken.ok()) upload_.reset();  // here, since it removes a file
      Continue(taken, /*more=*/ok);
    });
    if (!status.ok()) Continue(status);
  }

  // Whether the caller has sent nothing since `limit`. Then EndIdle() must follow; until it does, the call lives, and
  // nothing else ends it.
  bool IsIdleSince(absl::Time limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!reading_ || finished_ || reading_since_ > limit) return false;
    return finished_ = true;
  }
  void EndIdle() {
    Finish(ExpiredWhileWaiting(absl::StrCat(
        "the upload sent nothing for ", absl::FormatDuration(service_.options_.upload_idle), " (--upload_idle_s)")));
  }

  void OnDone() override {
    if (entered_.ok()) service_.gate_.Leave();
    {
      std::lock_guard<std::mutex> lock(service_.mutex_);
      service_.uploads_.erase(this);
    }
    delete this;
  }

 private:
  // Reads the next message where all is well, and ends the call otherwise.
  void Continue(const absl::Status& status, bool more = true) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (finished_) return;
    if (status.ok() && more) {
      reading_ = true;
      reading_since_ = absl::Now();
      lock.unlock();
      return StartRead(&message_);
    }
    finished_ = true;
    lock.unlock();
    status.ok() ? StartWriteAndFinish(answer_) : Finish(Told(status));
  }

  absl::Status TakeMessage() {
    v1::CreateLayerRequest request;
    const int64_t max_bytes = service_.options_.max_message_bytes + kFrameBytes;
    if (auto parsed = wire::ParseMessage(message_, max_bytes, request); !parsed.ok()) return parsed;
    if (!upload_) {
      if (!request.has_header()) return MissingField("header", "expected the first message to have the header");
      const auto header = wire::DecodeHeader(request.header());
      if (!header.ok()) return header.status();
      auto upload = service_.registry_.BeginUpload(*header);
      if (!upload.ok()) return upload.status();
      upload_ = *std::move(upload);
      return absl::OkStatus();
    }
    if (!request.has_chunk()) {
      return InvalidField(request.has_header() ? "header" : "chunk",
                          request.has_header() ? "UNEXPECTED_FIELD" : "MISSING",
                          "expected every message but the first to have a chunk");
    }
    const std::string& chunk = request.chunk();
    return upload_->Write(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(chunk.data()), chunk.size()));
  }

  // The caller has said that this was all, or has gone away.
  absl::Status End() {
    if (IsCancelled()) return CancelledWhileWaiting();
    if (!upload_) return MissingField("header", "expected a first message with the header, got none");
    const auto record = upload_->Commit();
    if (!record.ok()) return record.status();
    service_.registry_.library().Preload();  // it may be one that is pinned
    Log(LogLevel::kInfo, "layer_uploaded",
        {{"layer", (*record)->info().name}, {"content_hash", (*record)->info().content_hash}});
    v1::Layer layer;
    wire::EncodeListing({.info = (*record)->info()}, layer);
    return wire::SerializeMessage(layer, answer_);
  }

  LayerRegistryService& service_;
  absl::Status entered_;
  grpc::ByteBuffer message_;
  grpc::ByteBuffer answer_;
  std::unique_ptr<LayerStore::Upload> upload_;
  std::mutex mutex_;
  bool reading_ = false;      // guarded by mutex_; gRPC has a read to finish
  absl::Time reading_since_;  // guarded by mutex_
  bool finished_ = false;     // guarded by mutex_; Finish() was called
};

void LayerRegistryService::WatchUploads() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_.wait_for(lock, absl::ToChronoNanoseconds(options_.upload_idle / 4), [this] { return stopping_; })) {
    std::vector<Upload*> idle;
    std::copy_if(uploads_.begin(), uploads_.end(), std::back_inserter(idle),
                 [limit = absl::Now() - options_.upload_idle](Upload* upload) { return upload->IsIdleSince(limit); });
    lock.unlock();
    for (Upload* upload : idle) upload->EndIdle();
    lock.lock();
  }
}

// One DownloadLayer call: the layer's head and its weights, a chunk at a time, each when the one before is sent.
class LayerRegistryService::Download final : public ServerCall {
 public:
  Download(LayerRegistryService& service, std::unique_ptr<CallArrival> arrival)
      : ServerCall(std::move(arrival)), service_(service), entered_(service.gate_.Enter()) {
    entered_.ok() ? StartRead(&bytes_) : Finish(entered_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(NoMessage());
    const auto status = service_.workers_.Submit([this] {
      v1::DownloadLayerRequest message;
      const auto parsed =
          Guarded([&] { return wire::ParseMessage(bytes_, service_.options_.max_message_bytes, message); });
      if (!parsed.ok()) return Finish(parsed);
      if (message.name().empty()) return Finish(NoName());
      service_.registry_.library().Acquire(message.name(), DeadlineOf(context()),
                                           [this](auto layer) { Begin(std::move(layer)); });
    });
    if (!status.ok()) Finish(status);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(CancelledWhileWaiting());
    absl::Span<const std::byte> chunk;
    // A chunk that is on its way may bring the next call of this method, on another thread, before this one is over: from
    // then on nothing here is touched.
    const absl::Status status = Guarded([&]() -> absl::Status {
      chunk = layer_bytes_->Next(kDownloadChunkBytes);
      return chunk.empty() ? absl::OkStatus() : SendChunk(chunk);
    });
    if (!status.ok() || chunk.empty()) Finish(Told(status));
  }

  void OnDone() override {
    if (entered_.ok()) service_.gate_.Leave();
    delete this;
  }

 private:
  void Begin(absl::StatusOr<std::shared_ptr<const PreparedLayer>> layer) {
    if (!layer.ok()) return Finish(Told(Renamed("layer", "name", layer.status())));
    const absl::Status status = Guarded([&]() -> absl::Status {
      const PreparedLayer& prepared = **layer;
      auto layer_bytes = LayerBytes::Of(*layer);
      if (!layer_bytes.ok()) return layer_bytes.status();
      v1::DownloadLayerResponse first;
      wire::EncodeHeader({.name = prepared.name, .layer = prepared.layer, .size_bytes = layer_bytes->size_bytes()},
                         *first.mutable_header());
      first.set_content_hash(prepared.content_hash);
      layer_bytes_ = *std::move(layer_bytes);
      return Send(first);
    });
    if (!status.ok()) Finish(Told(status));
  }

  absl::Status SendChunk(absl::Span<const std::byte> chunk) {
    v1::DownloadLayerResponse message;
    message.set_chunk(chunk.data(), chunk.size());
    return Send(message);
  }

  absl::Status Send(const v1::DownloadLayerResponse& message) {
    if (auto status = wire::SerializeMessage(message, bytes_); !status.ok()) return status;
    StartWrite(bytes_);
    return absl::OkStatus();
  }

  LayerRegistryService& service_;
  const absl::Status entered_;
  std::optional<LayerBytes> layer_bytes_;  // what is still to be sent
  grpc::ByteBuffer bytes_;                 // of the request, then of a message
};

void LayerRegistryService::AddTo(CallLoop& loop) {
  Serve<v1::GetLayerRequest>(loop, "GetLayer", [this](const auto& message) { return GetLayer(message); });
  Serve<v1::ListLayersRequest>(loop, "ListLayers", [this](const auto& message) { return ListLayers(message); });
  Serve<v1::DeleteLayerRequest>(loop, "DeleteLayer", [this](const auto& message) { return DeleteLayer(message); });
  loop.Serve(NameOf("CreateLayer"),
             [this](std::unique_ptr<CallArrival> arrival) { return new Upload(*this, std::move(arrival)); });
  loop.Serve(NameOf("DownloadLayer"),
             [this](std::unique_ptr<CallArrival> arrival) { return new Download(*this, std::move(arrival)); });
}

}  // namespace layerd
