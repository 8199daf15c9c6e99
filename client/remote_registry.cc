#include "client/remote_registry.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <new>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/channel.h"
#include "client/layer_stream.h"
#include "client/remote_engine.h"
#include "layerd/v1/layer_registry.grpc.pb.h"
#include "lib/base/errors.h"
#include "lib/base/memory.h"
#include "lib/weights/layer_hash.h"
#include "lib/weights/safetensors.h"
#include "wire/layer_codec.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// A page of 1000 layers is longer than gRPC's own limit of 4 MiB.
constexpr int64_t kMaxAnswerBytes = int64_t{256} << 20;

absl::Status Malformed(const absl::Status& status) { return MalformedAnswer(absl::StrCat("has ", status.message())); }

absl::StatusOr<LayerListing> ListingOf(const v1::Layer& message) {
  auto listing = wire::DecodeListing(message);
  if (!listing.ok()) return Malformed(listing.status());
  return listing;
}

// The bytes of a download, as they come.
class Arriving {
 public:
  explicit Arriving(const std::string& name) : name_(name) {}

  absl::Status Take(const v1::DownloadLayerResponse& message, const TransferProgress& progress) {
    if (!header_) return TakeHeader(message, progress);
    if (message.has_header()) return MalformedAnswer("has a second header");
    const std::string& chunk = message.chunk();
    if (static_cast<int64_t>(chunk.size()) > header_->size_bytes - done_) {
      return MalformedAnswer(absl::StrCat("has more than the ", header_->size_bytes, " bytes that it announced"));
    }
    std::memcpy(bytes_.get() + done_, chunk.data(), chunk.size());
    done_ += static_cast<int64_t>(chunk.size());
    if (progress) progress(done_, header_->size_bytes);
    return absl::OkStatus();
  }

  // The layer, once all has been taken.
  absl::StatusOr<DownloadedLayer> Finish() {
    if (!header_) return MalformedAnswer("has no header");
    if (done_ != header_->size_bytes) {
      return MalformedAnswer(absl::StrCat("has ", done_, " bytes of the ", header_->size_bytes, " that it announced"));
    }
    Layer layer = std::move(header_->layer);
    if (auto status = TakeWeights(layer); !status.ok()) return Malformed(status);
    if (auto extent = CheckLayer(layer); !extent.ok()) return Malformed(extent.status());
    const std::string hash = ContentHash(layer);
    if (hash != content_hash_) {
      return MalformedAnswer(
          absl::StrCat("has the content hash ", Shortened(content_hash_), ", but its bytes have ", hash));
    }
    return DownloadedLayer{std::move(layer), hash};
  }

 private:
  absl::Status TakeHeader(const v1::DownloadLayerResponse& message, const TransferProgress& progress) {
    if (!message.has_header()) return MalformedAnswer("does not begin with a header");
    auto header = wire::DecodeHeader(message.header());
    if (!header.ok()) return Malformed(header.status());
    if (header->name != name_) return MalformedAnswer(absl::StrCat("has the layer ", Shortened(header->name)));
    if (header->size_bytes < 0) return MalformedAnswer(absl::StrCat("announces ", header->size_bytes, " bytes"));
    // The size is the server's word: nothing is touched before it comes.
    if (CanReserve(std::max<int64_t>(header->size_bytes, 1))) {
      bytes_.reset(new (std::nothrow) std::byte[static_cast<size_t>(header->size_bytes)]);
    }
    if (bytes_ == nullptr) {
      return TooLarge("layer", "OUT_OF_MEMORY", absl::StrCat("no memory for its ", header->size_bytes, " bytes"));
    }
    content_hash_ = message.content_hash();
    header_ = *std::move(header);
    if (progress) progress(0, header_->size_bytes);
    return absl::OkStatus();
  }

  // Gives `layer` the tensors of the safetensors file that has come.
  absl::Status TakeWeights(Layer& layer) {
    const auto size = static_cast<uint64_t>(done_);
    uint64_t json_bytes = 0;
    constexpr uint64_t kLengthBytes = sizeof(json_bytes);
    if (size < kLengthBytes) return InvalidField("chunk", "SAFETENSORS_TRUNCATED", "too few bytes for a length");
    std::memcpy(&json_bytes, bytes_.get(), kLengthBytes);
    if (json_bytes > std::min(size - kLengthBytes, kMaxSafetensorsHeaderBytes)) {
      return InvalidField("chunk", "SAFETENSORS_TRUNCATED", absl::StrCat("too few bytes for a header of ", json_bytes));
    }
    const std::string_view json(reinterpret_cast<const char*>(bytes_.get()) + kLengthBytes, json_bytes);
    const std::byte* data = bytes_.get() + kLengthBytes + json_bytes;
    const auto header = ParseSafetensorsHeader(json, size - kLengthBytes - json_bytes, name_);
    if (!header.ok()) return header.status();
    for (const auto& [role, entry] : header->tensors) {
      const auto dtype = DTypeOfSafetensorsName(entry.dtype);
      if (!dtype) return InvalidField("chunk", "SAFETENSORS_DTYPE", absl::StrCat("the dtype ", entry.dtype));
      auto tensor = Tensor::Adopt(*dtype, entry.shape, bytes_, {data + entry.begin, entry.end - entry.begin});
      if (!tensor.ok()) return tensor.status();
      if (auto status = SetWeight(layer, role, *std::move(tensor)); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const std::string name_;
  std::optional<UploadHeader> header_;
  std::string content_hash_;
  std::shared_ptr<std::byte[]> bytes_;
  int64_t done_ = 0;
};

}  // namespace

struct RemoteRegistry::Impl {
  explicit Impl(const RemoteRegistryOptions& opts)
      : options(opts), stub(v1::LayerRegistry::NewStub(Connect(options.target, kMaxAnswerBytes))) {}

  // The context of a call that takes at most the timeout.
  void Limit(grpc::ClientContext& context) const {
    context.set_deadline(absl::ToChronoTime(absl::Now() + options.timeout));
  }

  const RemoteRegistryOptions options;
  std::unique_ptr<v1::LayerRegistry::Stub> stub;
};

RemoteRegistry::RemoteRegistry(const RemoteRegistryOptions& options) : impl_(std::make_unique<Impl>(options)) {}
RemoteRegistry::~RemoteRegistry() = default;

absl::StatusOr<LayerListing> RemoteRegistry::Get(const std::string& name) {
  grpc::ClientContext context;
  impl_->Limit(context);
  v1::GetLayerRequest request;
  request.set_name(name);
  v1::Layer layer;
  const grpc::Status status = impl_->stub->GetLayer(&context, request, &layer);
  if (!status.ok()) return wire::DecodeStatus(status);
  return ListingOf(layer);
}

absl::StatusOr<LayerPage> RemoteRegistry::List(const LayerQuery& query) {
  grpc::ClientContext context;
  impl_->Limit(context);
  v1::ListLayersRequest request;
  if (!query.model.empty()) request.set_parent(absl::StrCat("models/", query.model));
  request.set_filter(query.filter);
  request.set_page_size(query.page_size);
  request.set_page_token(query.page_token);
  v1::ListLayersResponse response;
  const grpc::Status status = impl_->stub->ListLayers(&context, request, &response);
  if (!status.ok()) return wire::DecodeStatus(status);
  LayerPage page;
  for (const v1::Layer& layer : response.layers()) {
    auto listing = ListingOf(layer);
    if (!listing.ok()) return listing.status();
    page.layers.push_back(*std::move(listing));
  }
  page.next_page_token = response.next_page_token();
  return page;
}

absl::StatusOr<std::vector<LayerListing>> RemoteRegistry::ListAll(LayerQuery query) {
  std::vector<LayerListing> layers;
  query.page_size = std::numeric_limits<int32_t>::max();  // as many as the server gives
  do {
    auto page = List(query);
    if (!page.ok()) return page.status();
    std::move(page->layers.begin(), page->layers.end(), std::back_inserter(layers));
    if (!page->next_page_token.empty() && page->next_page_token == query.page_token) {
      return MalformedAnswer("has its own page as the next one");
    }
    query.page_token = page->next_page_token;
  } while (!query.page_token.empty());
  return layers;
}

absl::Status RemoteRegistry::Delete(const std::string& name, const std::optional<std::string>& etag) {
  grpc::ClientContext context;
  impl_->Limit(context);
  v1::DeleteLayerRequest request;
  request.set_name(name);
  if (etag) request.set_etag(*etag);
  google::protobuf::Empty response;
  return wire::DecodeStatus(impl_->stub->DeleteLayer(&context, request, &response));
}

absl::StatusOr<LayerListing> RemoteRegistry::Upload(const std::string& name, const Layer& layer,
                                                    const UploadOptions& options) {
  if (options.chunk_bytes < 1) {
    return InvalidField("chunk_bytes", "OUT_OF_RANGE", absl::StrCat("expected 1 or more, got ", options.chunk_bytes));
  }
  std::map<std::string, Tensor> tensors;
  for (const auto& [role, tensor] : WeightsOf(layer)) tensors.emplace(role, tensor);
  const auto ordered = InFileOrder(tensors);
  const auto head = SafetensorsHead(ordered, {}, name);
  if (!head.ok()) return head.status();
  std::vector<absl::Span<const std::byte>> parts = {{reinterpret_cast<const std::byte*>(head->data()), head->size()}};
  for (const auto& [role, tensor] : ordered) parts.push_back(tensor.bytes());

  UploadHeader header{.name = name, .layer = layer, .etag = options.etag};
  Sha256 hash;
  for (const auto& part : parts) {
    hash.Update(part);
    header.size_bytes += static_cast<int64_t>(part.size());
  }
  header.sha256 = hash.Finish();
  v1::LayerHeader message;
  wire::EncodeHeader(header, message);
  const auto answer =
      SendLayer(*impl_->stub, message, parts, options.chunk_bytes, options.progress, impl_->options.timeout);
  if (!answer.ok()) return answer.status();
  return ListingOf(*answer);
}

absl::StatusOr<DownloadedLayer> RemoteRegistry::Download(const std::string& name, const TransferProgress& progress) {
  Arriving arriving(name);
  const absl::Status status = ReceiveLayer(
      *impl_->stub, name, [&](const v1::DownloadLayerResponse& message) { return arriving.Take(message, progress); },
      impl_->options.timeout);
  if (!status.ok()) return status;
  return arriving.Finish();
}

}  // namespace layerd
