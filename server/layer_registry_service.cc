#include "server/layer_registry_service.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lib/base/errors.h"
#include "lib/resident/layer_bytes.h"
#include "server/deadline.h"
#include "server/log.h"
#include "wire/layer_codec.h"
#include "wire/message_codec.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// Uploads that may be under way at once: each holds a file and up to one message.
constexpr size_t kMaxUploads = 64;
// Bytes of a download's messages: what is taken out of panels, and copied, within 50 µs.
constexpr size_t kDownloadChunkBytes = size_t{64} << 10;
// What a chunk's message has beside the chunk.
constexpr int64_t kFrameBytes = 64;

// Ends any kind of reactor with `status`.
template <typename Reactor>
void FinishWith(Reactor& reactor, grpc::CallbackServerContext& context, const absl::Status& status) {
  if (const auto pushback = wire::PushbackOf(status)) context.AddTrailingMetadata(wire::kPushbackTrailer, *pushback);
  // Faults of the store's folder or disk, which whoever runs the server has to know.
  const std::string reason = DetailsOf(status).reason;
  if (status.code() == absl::StatusCode::kInternal || reason == "DISK_FULL") {
    LogSeldom(LogLevel::kError, "layer_store_fault", reason, std::string(status.message()));
  }
  reactor.Finish(wire::EncodeStatus(status));
}

// Runs `work`, in which memory may not be had.
template <typename Work>
absl::Status Guarded(const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

class UnaryReactor final : public grpc::ServerUnaryReactor {
 public:
  explicit UnaryReactor(absl::AnyInvocable<void()> on_done) : on_done_(std::move(on_done)) {}
  void OnDone() override {
    if (on_done_) on_done_();
    delete this;
  }

 private:
  absl::AnyInvocable<void()> on_done_;
};

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
grpc::ServerUnaryReactor* LayerRegistryService::Serve(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
                                                      Handle handle) {
  const absl::Status entered = gate_.Enter();
  auto* reactor = new UnaryReactor(entered.ok() ? absl::AnyInvocable<void()>([this] { gate_.Leave(); }) : nullptr);
  absl::Status status = entered;
  if (status.ok()) {
    auto* bytes = const_cast<grpc::ByteBuffer*>(request);
    status = workers_.Submit([this, context, bytes, response, reactor, handle] {
      const absl::Status served = Guarded([&] {
        Request message;
        if (auto parsed = wire::ParseMessage(*bytes, options_.max_message_bytes, message); !parsed.ok()) return parsed;
        const auto answer = handle(message);
        return answer.ok() ? wire::SerializeMessage(*answer, *response) : answer.status();
      });
      FinishWith(*reactor, *context, served);
    });
  }
  if (!status.ok()) FinishWith(*reactor, *context, status);
  return reactor;
}

grpc::ServerUnaryReactor* LayerRegistryService::GetLayer(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Serve<v1::GetLayerRequest>(
      context, request, response, [this](const v1::GetLayerRequest& message) -> absl::StatusOr<v1::Layer> {
        if (message.name().empty()) return MissingField("name", "expected models/{model}/layers/{layer}, got nothing");
        const auto listing = registry_.library().Get(message.name());
        if (!listing.ok()) return listing.status();
        v1::Layer layer;
        wire::EncodeListing(*listing, layer);
        return layer;
      });
}

grpc::ServerUnaryReactor* LayerRegistryService::ListLayers(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* response) {
  return Serve<v1::ListLayersRequest>(
      context, request, response,
      [this](const v1::ListLayersRequest& message) -> absl::StatusOr<v1::ListLayersResponse> {
        const auto query = wire::DecodeQuery(message);
        if (!query.ok()) return query.status();
        const auto page = registry_.library().List(*query);
        if (!page.ok()) return page.status();
        v1::ListLayersResponse answer;
        for (const LayerListing& listing : page->layers) wire::EncodeListing(listing, *answer.add_layers());
        answer.set_next_page_token(page->next_page_token);
        return answer;
      });
}

grpc::ServerUnaryReactor* LayerRegistryService::DeleteLayer(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  return Serve<v1::DeleteLayerRequest>(
      context, request, response,
      [this](const v1::DeleteLayerRequest& message) -> absl::StatusOr<google::protobuf::Empty> {
        if (message.name().empty()) return MissingField("name", "expected models/{model}/layers/{layer}, got nothing");
        const auto etag = message.etag().empty() ? std::nullopt : std::optional(message.etag());
        if (auto status = registry_.Delete(message.name(), etag); !status.ok()) return status;
        registry_.library().Preload();  // frees its memory
        Log(LogLevel::kInfo, "layer_deleted", {{"layer", message.name()}});
        return google::protobuf::Empty();
      });
}

// One CreateLayer call. Its methods run one after the other, on gRPC's threads and on workers in turn.
class LayerRegistryService::Upload final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  Upload(LayerRegistryService& service, grpc::CallbackServerContext* context, grpc::ByteBuffer* response)
      : service_(service), context_(context), response_(response) {
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
    FinishWith(
        *this, *context_,
        ExpiredWhileWaiting(absl::StrCat("the upload sent nothing for ",
                                         absl::FormatDuration(service_.options_.upload_idle), " (--upload_idle_s)")));
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
    FinishWith(*this, *context_, status);
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
    if (context_->IsCancelled()) return CancelledWhileWaiting();
    if (!upload_) return MissingField("header", "expected a first message with the header, got none");
    const auto record = upload_->Commit();
    if (!record.ok()) return record.status();
    service_.registry_.library().Preload();  // it may be one that is pinned
    Log(LogLevel::kInfo, "layer_uploaded",
        {{"layer", (*record)->info().name}, {"content_hash", (*record)->info().content_hash}});
    v1::Layer layer;
    wire::EncodeListing({.info = (*record)->info()}, layer);
    return wire::SerializeMessage(layer, *response_);
  }

  LayerRegistryService& service_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const response_;
  absl::Status entered_;
  grpc::ByteBuffer message_;
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

grpc::ServerReadReactor<grpc::ByteBuffer>* LayerRegistryService::CreateLayer(grpc::CallbackServerContext* context,
                                                                             grpc::ByteBuffer* response) {
  return new Upload(*this, context, response);
}

// One DownloadLayer call: the layer's head and its weights, a chunk at a time, each when the one before is sent.
class LayerRegistryService::Download final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  Download(LayerRegistryService& service, grpc::CallbackServerContext* context, const grpc::ByteBuffer* request)
      : service_(service), context_(context) {
    entered_ = service_.gate_.Enter();
    if (!entered_.ok()) {
      FinishWith(*this, *context_, entered_);
      return;
    }
    auto* bytes = const_cast<grpc::ByteBuffer*>(request);
    const auto status = service_.workers_.Submit([this, bytes] {
      v1::DownloadLayerRequest message;
      const auto parsed = wire::ParseMessage(*bytes, service_.options_.max_message_bytes, message);
      if (!parsed.ok()) return FinishWith(*this, *context_, parsed);
      if (message.name().empty()) {
        return FinishWith(*this, *context_,
                          MissingField("name", "expected models/{model}/layers/{layer}, got nothing"));
      }
      service_.registry_.library().Acquire(message.name(), DeadlineOf(*context_),
                                           [this](auto layer) { Begin(std::move(layer)); });
    });
    if (!status.ok()) FinishWith(*this, *context_, status);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return FinishWith(*this, *context_, CancelledWhileWaiting());
    absl::Span<const std::byte> chunk;
    // A chunk that is on its way may bring the next call of this method, on another thread, before this one is over: from
    // then on nothing here is touched.
    const absl::Status status = Guarded([&]() -> absl::Status {
      chunk = layer_bytes_->Next(kDownloadChunkBytes);
      return chunk.empty() ? absl::OkStatus() : SendChunk(chunk);
    });
    if (!status.ok() || chunk.empty()) FinishWith(*this, *context_, status);
  }

  void OnDone() override {
    if (entered_.ok()) service_.gate_.Leave();
    delete this;
  }

 private:
  void Begin(absl::StatusOr<std::shared_ptr<const PreparedLayer>> layer) {
    if (!layer.ok()) return FinishWith(*this, *context_, Renamed("layer", "name", layer.status()));
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
    if (!status.ok()) FinishWith(*this, *context_, status);
  }

  absl::Status SendChunk(absl::Span<const std::byte> chunk) {
    v1::DownloadLayerResponse message;
    message.set_chunk(chunk.data(), chunk.size());
    return Send(message);
  }

  absl::Status Send(const v1::DownloadLayerResponse& message) {
    if (auto status = wire::SerializeMessage(message, bytes_); !status.ok()) return status;
    StartWrite(&bytes_);
    return absl::OkStatus();
  }

  LayerRegistryService& service_;
  grpc::CallbackServerContext* const context_;
  absl::Status entered_;
  std::optional<LayerBytes> layer_bytes_;  // what is still to be sent
  grpc::ByteBuffer bytes_;
};

grpc::ServerWriteReactor<grpc::ByteBuffer>* LayerRegistryService::DownloadLayer(grpc::CallbackServerContext* context,
                                                                                const grpc::ByteBuffer* request) {
  return new Download(*this, context, request);
}

}  // namespace layerd
