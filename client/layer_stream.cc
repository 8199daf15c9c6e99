#include "client/layer_stream.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// What gRPC's threads tell of a stream, for the thread that waits for it. The stream is held open (AddHold) for as long as
// that thread may start operations.
class StreamEvents {
 public:
  StreamEvents(grpc::ClientContext& context, absl::Duration patience) : context_(context), patience_(patience) {}

  void OperationDone(bool ok) {
    std::lock_guard<std::mutex> lock(mutex_);
    operation_ = ok;
    changed_.notify_one();
  }
  void StreamDone(const grpc::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    changed_.notify_one();
  }

  // Whether the operation that was started has succeeded; false where the stream is over.
  bool WaitForOperation() {
    const bool ok = Wait(operation_);
    operation_.reset();
    return ok;
  }

  // How the stream ended. No operation may be started any more.
  absl::Status WaitForEnd() {
    const grpc::Status status = Wait(status_);
    if (status.ok()) return absl::OkStatus();
    if (impatient_) {
      return absl::DeadlineExceededError(absl::StrCat("nothing passed for ", absl::FormatDuration(patience_)));
    }
    return wire::DecodeStatus(status);
  }

 private:
  // Waits until `event` is there; from `patience_` on, by ending the stream, which brings it about.
  template <typename Event>
  Event Wait(const std::optional<Event>& event) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto there = [&event] { return event.has_value(); };
    if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(patience_), there)) {
      impatient_ = true;
      lock.unlock();
      context_.TryCancel();
      lock.lock();
      changed_.wait(lock, there);
    }
    return *event;
  }

  grpc::ClientContext& context_;
  const absl::Duration patience_;
  bool impatient_ = false;  // of the waiting thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<bool> operation_;       // guarded by mutex_ while an operation is under way
  std::optional<grpc::Status> status_;  // guarded by mutex_
};

class Upload : public grpc::ClientWriteReactor<v1::CreateLayerRequest> {
 public:
  Upload(v1::LayerRegistry::Stub& stub, absl::Duration patience) : events_(context_, patience) {
    stub.async()->CreateLayer(&context_, &layer_, this);
    AddHold();
    StartCall();
  }

  bool Write(const v1::CreateLayerRequest& message) {
    StartWrite(&message);
    return events_.WaitForOperation();
  }

  // `complete`: all has been written.
  absl::StatusOr<v1::Layer> Finish(bool complete) {
    if (complete) StartWritesDone();
    RemoveHold();
    if (auto status = events_.WaitForEnd(); !status.ok()) return status;
    return std::move(layer_);
  }

 private:
  void OnWriteDone(bool ok) override { events_.OperationDone(ok); }
  void OnDone(const grpc::Status& status) override { events_.StreamDone(status); }

  grpc::ClientContext context_;
  v1::Layer layer_;
  StreamEvents events_;
};

class Download : public grpc::ClientReadReactor<v1::DownloadLayerResponse> {
 public:
  Download(v1::LayerRegistry::Stub& stub, const std::string& name, absl::Duration patience)
      : events_(context_, patience) {
    request_.set_name(name);
    stub.async()->DownloadLayer(&context_, &request_, this);
    AddHold();
    StartCall();
  }

  bool Read(v1::DownloadLayerResponse& message) {
    StartRead(&message);
    return events_.WaitForOperation();
  }

  void Cancel() { context_.TryCancel(); }

  absl::Status Finish() {
    RemoveHold();
    return events_.WaitForEnd();
  }

 private:
  void OnReadDone(bool ok) override { events_.OperationDone(ok); }
  void OnDone(const grpc::Status& status) override { events_.StreamDone(status); }

  grpc::ClientContext context_;
  v1::DownloadLayerRequest request_;
  StreamEvents events_;
};

}  // namespace

absl::StatusOr<v1::Layer> SendLayer(v1::LayerRegistry::Stub& stub, const v1::LayerHeader& header,
                                    absl::Span<const absl::Span<const std::byte>> parts, int64_t chunk_bytes,
                                    const TransferProgress& progress, absl::Duration patience) {
  Upload upload(stub, patience);
  v1::CreateLayerRequest message;
  *message.mutable_header() = header;
  bool open = upload.Write(message);
  if (open && progress) progress(0, header.size_bytes());
  std::string& chunk = *message.mutable_chunk();
  int64_t done = 0;
  const auto send = [&] {
    open = upload.Write(message);
    done += static_cast<int64_t>(chunk.size());
    if (open && progress) progress(done, header.size_bytes());
    chunk.clear();
  };
  for (absl::Span<const std::byte> rest : parts) {
    while (open && !rest.empty()) {
      const size_t count = std::min(rest.size(), static_cast<size_t>(chunk_bytes) - chunk.size());
      chunk.append(reinterpret_cast<const char*>(rest.data()), count);
      rest.remove_prefix(count);
      if (static_cast<int64_t>(chunk.size()) == chunk_bytes) send();
    }
  }
  if (open && !chunk.empty()) send();
  return upload.Finish(open);
}

absl::Status ReceiveLayer(v1::LayerRegistry::Stub& stub, const std::string& name,
                          absl::FunctionRef<absl::Status(const v1::DownloadLayerResponse&)> sink,
                          absl::Duration patience) {
  Download download(stub, name, patience);
  v1::DownloadLayerResponse message;
  absl::Status status;
  while (status.ok() && download.Read(message)) status = sink(message);
  if (!status.ok()) download.Cancel();
  const absl::Status end = download.Finish();
  return status.ok() ? end : status;
}

}  // namespace layerd
