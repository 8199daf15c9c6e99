// RemoteRegistry against a service that is written here, so that it can also answer what no layerd does.
#include "client/remote_registry.h"

#include <gmock/gmock.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "client/remote_engine.h"
#include "layerd/v1/layer_registry.grpc.pb.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "lib/weights/layer_hash.h"
#include "wire/layer_codec.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

using testing::HasSubstr;

constexpr char kName[] = "models/m/layers/mlp";

Layer SeededLayer(int64_t hidden_dim = 5) {
  FeedForwardLayer layer{.spec = SwiGluSpec()};
  layer.weights = SeededFeedForwardWeights(1, layer.spec, DType::kBFloat16, 3, hidden_dim, /*biases=*/true);
  layer.weights.down_bias = SeededBeta(1, DType::kFloat32, 3);  // dtypes differ
  return layer;
}

v1::Layer MessageOf(const std::string& name, const Layer& layer) {
  LayerListing listing;
  listing.info.name = name;
  listing.info.uploaded = true;
  listing.info.outline = OutlineOf(layer);
  listing.info.content_hash = ContentHash(layer);
  listing.info.extent = *CheckLayer(layer);
  v1::Layer message;
  wire::EncodeListing(listing, message);
  return message;
}

// Keeps the last upload and gives it back as a download. What the tests change, they change before they call.
class FakeRegistry : public v1::LayerRegistry::Service {
 public:
  v1::LayerHeader header;
  std::vector<size_t> chunk_sizes;
  std::string bytes;
  v1::Layer created;                                    // the answer to uploads
  absl::Status refusal;                                 // of an upload, after its header
  std::shared_future<void> hold;                        // what uploads and downloads wait for, where it is valid
  std::vector<v1::DownloadLayerResponse> download;      // what is downloaded
  std::map<std::string, v1::ListLayersResponse> pages;  // by token
  std::vector<v1::ListLayersRequest> list_requests;
  v1::DeleteLayerRequest delete_request;

  grpc::Status CreateLayer(grpc::ServerContext*, grpc::ServerReader<v1::CreateLayerRequest>* reader,
                           v1::Layer* layer) override {
    v1::CreateLayerRequest request;
    if (!reader->Read(&request)) return {grpc::StatusCode::INVALID_ARGUMENT, "no header"};
    header = request.header();
    if (hold.valid()) hold.wait();
    if (!refusal.ok()) return wire::EncodeStatus(refusal);
    chunk_sizes.clear();
    bytes.clear();
    while (reader->Read(&request)) {
      chunk_sizes.push_back(request.chunk().size());
      bytes += request.chunk();
    }
    *layer = created;
    return grpc::Status::OK;
  }

  grpc::Status DownloadLayer(grpc::ServerContext*, const v1::DownloadLayerRequest*,
                             grpc::ServerWriter<v1::DownloadLayerResponse>* writer) override {
    // Copies: a client that has given up may be gone, and the next test's answer be set, before this returns.
    const auto parts = download;
    const grpc::Status status = wire::EncodeStatus(refusal);
    for (const auto& part : parts) writer->Write(part);
    if (hold.valid()) hold.wait();
    return status;
  }

  grpc::Status GetLayer(grpc::ServerContext*, const v1::GetLayerRequest* request, v1::Layer* layer) override {
    if (request->name() != kName) {
      return wire::EncodeStatus(
          WithDetails(absl::StatusCode::kNotFound, "no such layer", {.reason = "LAYER_NOT_FOUND", .field = "name"}));
    }
    *layer = created;
    return grpc::Status::OK;
  }

  grpc::Status ListLayers(grpc::ServerContext*, const v1::ListLayersRequest* request,
                          v1::ListLayersResponse* response) override {
    list_requests.push_back(*request);
    *response = pages[request->page_token()];
    return grpc::Status::OK;
  }

  grpc::Status DeleteLayer(grpc::ServerContext*, const v1::DeleteLayerRequest* request,
                           google::protobuf::Empty*) override {
    delete_request = *request;
    return wire::EncodeStatus(refusal);
  }
};

class RemoteRegistryTest : public testing::Test {
 protected:
  RemoteRegistryTest() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&fake_);
    server_ = builder.BuildAndStart();
    options_.target = "127.0.0.1:" + std::to_string(port);
    fake_.created = MessageOf(kName, layer_);
  }
  ~RemoteRegistryTest() override { server_->Shutdown(); }

  RemoteRegistry Client() const { return RemoteRegistry(options_); }

  // What a server sends for `layer_`, taken from an upload.
  std::vector<v1::DownloadLayerResponse> GoodDownload() {
    EXPECT_TRUE(Client().Upload(kName, layer_).ok());
    std::vector<v1::DownloadLayerResponse> messages(1);
    *messages[0].mutable_header() = fake_.header;
    messages[0].set_content_hash(ContentHash(layer_));
    for (size_t at = 0; at < fake_.bytes.size(); at += 50) {
      messages.emplace_back().set_chunk(fake_.bytes.substr(at, 50));
    }
    return messages;
  }

  const Layer layer_ = SeededLayer();
  FakeRegistry fake_;
  std::unique_ptr<grpc::Server> server_;
  RemoteRegistryOptions options_;
};

TEST_F(RemoteRegistryTest, UploadsHeaderAndBytesInChunksOfAnySize) {
  std::string whole;
  for (const int64_t chunk : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{1} << 20}) {
    std::vector<std::pair<int64_t, int64_t>> progress;
    const auto listing = Client().Upload(
        kName, layer_, {.etag = "e", .chunk_bytes = chunk, .progress = [&](int64_t done, int64_t total) {
                          progress.emplace_back(done, total);
                        }});
    ASSERT_TRUE(listing.ok()) << listing.status();
    EXPECT_EQ(listing->info.content_hash, ContentHash(layer_));
    EXPECT_EQ(fake_.header.name(), kName);
    EXPECT_EQ(fake_.header.etag(), "e");
    EXPECT_EQ(fake_.header.feed_forward().activation(), v1::ACTIVATION_SILU);
    EXPECT_EQ(fake_.header.size_bytes(), static_cast<int64_t>(fake_.bytes.size()));
    EXPECT_EQ(fake_.header.sha256(), Sha256Of(absl::MakeConstSpan(
                                         reinterpret_cast<const std::byte*>(fake_.bytes.data()), fake_.bytes.size())));
    for (size_t i = 0; i + 1 < fake_.chunk_sizes.size(); ++i) {
      EXPECT_EQ(static_cast<int64_t>(fake_.chunk_sizes[i]), chunk);
    }
    EXPECT_LE(static_cast<int64_t>(fake_.chunk_sizes.back()), chunk);
    EXPECT_EQ(progress.size(), 1 + fake_.chunk_sizes.size());
    EXPECT_EQ(progress.front(), std::pair(int64_t{0}, fake_.header.size_bytes()));
    EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
    EXPECT_EQ(progress.back(), std::pair(fake_.header.size_bytes(), fake_.header.size_bytes()));
    EXPECT_TRUE(whole.empty() || fake_.bytes == whole);
    whole = fake_.bytes;
  }
  EXPECT_EQ(Client().Upload(kName, layer_, {.chunk_bytes = 0}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(RemoteRegistryTest, WhatTheServerRefusesWhileBytesAreSentIsReturned) {
  fake_.refusal = TooLarge("header.size_bytes", "STORE_FULL", "the store is full");
  // More than fits between here and a server that does not read.
  const Layer large = SeededLayer(int64_t{1} << 20);
  for (const int64_t chunk : {int64_t{1} << 10, int64_t{4} << 20}) {
    const absl::Status status = Client().Upload(kName, large, {.chunk_bytes = chunk}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(DetailsOf(status).reason, "STORE_FULL");
    EXPECT_EQ(DetailsOf(status).field, "header.size_bytes");
  }
}

TEST_F(RemoteRegistryTest, AStreamThatStandsStillEndsAsNoAnswer) {
  std::promise<void> release;
  fake_.download = GoodDownload();
  fake_.hold = release.get_future().share();
  options_.timeout = absl::Milliseconds(100);
  // One that waits for the answer, one that waits to be read, and a download that does not end.
  const absl::Status statuses[] = {Client().Upload(kName, layer_).status(),
                                   Client().Upload(kName, SeededLayer(int64_t{1} << 20)).status(),
                                   Client().Download(kName).status()};
  release.set_value();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_EQ(DetailsOf(status).reason, "");
  }
}

TEST_F(RemoteRegistryTest, DownloadsWhatWasUploaded) {
  fake_.download = GoodDownload();
  int64_t done = 0;
  const auto layer = Client().Download(kName, [&](int64_t bytes, int64_t total) {
    EXPECT_GE(bytes, done);
    done = bytes;
    EXPECT_EQ(total, fake_.header.size_bytes());
  });
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(done, fake_.header.size_bytes());
  EXPECT_EQ(layer->content_hash, ContentHash(layer_));
  EXPECT_EQ(ContentHash(layer->layer), ContentHash(layer_));
}

TEST_F(RemoteRegistryTest, ADamagedDownloadIsNoLayer) {
  const auto good = GoodDownload();
  using Messages = std::vector<v1::DownloadLayerResponse>;
  const std::map<std::string, std::function<void(Messages&)>> damages = {
      {"nothing", [](Messages& m) { m.clear(); }},
      {"no header", [](Messages& m) { m.erase(m.begin()); }},
      {"two headers", [](Messages& m) { m.insert(m.begin(), m[0]); }},
      {"no options", [](Messages& m) { m[0].mutable_header()->clear_feed_forward(); }},
      {"other options",
       [](Messages& m) { m[0].mutable_header()->mutable_feed_forward()->set_activation(v1::ACTIVATION_RELU); }},
      {"another layer", [](Messages& m) { m[0].mutable_header()->set_name("models/m/layers/other"); }},
      {"a negative size", [](Messages& m) { m[0].mutable_header()->set_size_bytes(-1); }},
      {"too few bytes", [](Messages& m) { m.pop_back(); }},
      {"too many bytes", [](Messages& m) { m.push_back(m.back()); }},
      {"no bytes",
       [](Messages& m) {
         m.resize(1);
         m[0].mutable_header()->set_size_bytes(0);
       }},
      {"a flipped bit", [](Messages& m) { (*m.back().mutable_chunk())[3] ^= 1; }},
      {"a length beyond the file", [](Messages& m) { (*m[1].mutable_chunk())[5] = 1; }},
      {"a role that no layer has",
       [](Messages& m) { m[1].mutable_chunk()->replace(m[1].chunk().find("down"), 4, "town"); }},
      {"another hash", [](Messages& m) { m[0].set_content_hash(std::string(64, 'a')); }}};
  for (const auto& [name, damage] : damages) {
    fake_.download = good;
    damage(fake_.download);
    const absl::Status status = Client().Download(kName).status();
    EXPECT_EQ(DetailsOf(status).reason, kMalformedAnswer) << name << ": " << status;
  }
  fake_.download = good;
  EXPECT_TRUE(Client().Download(kName).ok());
}

TEST_F(RemoteRegistryTest, AnErrorAmidADownloadIsTheServers) {
  fake_.download = GoodDownload();
  fake_.download.pop_back();
  fake_.refusal = WithDetails(absl::StatusCode::kFailedPrecondition, "damaged", {.reason = "LAYER_DAMAGED"});
  EXPECT_EQ(DetailsOf(Client().Download(kName).status()).reason, "LAYER_DAMAGED");
}

TEST_F(RemoteRegistryTest, ALayerThatCannotBeAllocatedIsAnError) {
  fake_.download = GoodDownload();
  fake_.download[0].mutable_header()->set_size_bytes(int64_t{1} << 62);
  EXPECT_EQ(Client().Download(kName).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(RemoteRegistryTest, ListsAllPages) {
  for (const auto& [token, next, name] :
       {std::tuple("", "2", "models/a/layers/x"), {"2", "3", "models/b/layers/y"}, {"3", "", "models/c/layers/z"}}) {
    *fake_.pages[token].add_layers() = MessageOf(name, layer_);
    fake_.pages[token].set_next_page_token(next);
  }
  const auto layers = Client().ListAll({.model = "-", .filter = "*.x"});
  ASSERT_TRUE(layers.ok()) << layers.status();
  ASSERT_EQ(layers->size(), 3u);
  EXPECT_EQ((*layers)[2].info.name, "models/c/layers/z");
  ASSERT_EQ(fake_.list_requests.size(), 3u);
  for (const auto& request : fake_.list_requests) {
    EXPECT_EQ(request.parent(), "models/-");
    EXPECT_EQ(request.filter(), "*.x");
  }
  const auto page = Client().List({.page_size = 1, .page_token = "2"});
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(page->next_page_token, "3");
  EXPECT_EQ(fake_.list_requests.back().page_size(), 1);

  fake_.pages["2"].set_next_page_token("2");
  EXPECT_EQ(DetailsOf(Client().ListAll({}).status()).reason, kMalformedAnswer) << "no list without end";
}

TEST_F(RemoteRegistryTest, GetsAndDeletes) {
  const auto listing = Client().Get(kName);
  ASSERT_TRUE(listing.ok()) << listing.status();
  EXPECT_EQ(listing->info.extent.dim, 3);
  const absl::Status missing = Client().Get("models/m/layers/other").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(DetailsOf(missing).reason, "LAYER_NOT_FOUND");

  EXPECT_TRUE(Client().Delete(kName).ok());
  EXPECT_EQ(fake_.delete_request.name(), kName);
  EXPECT_EQ(fake_.delete_request.etag(), "");
  EXPECT_TRUE(Client().Delete(kName, "e").ok());
  EXPECT_EQ(fake_.delete_request.etag(), "e");
  fake_.refusal = WithDetails(absl::StatusCode::kAborted, "etag", {.reason = "ETAG_MISMATCH"});
  EXPECT_EQ(DetailsOf(Client().Delete(kName, "e")).reason, "ETAG_MISMATCH");
}

TEST_F(RemoteRegistryTest, AnAnswerThatIsNoLayerIsToldAsSuch) {
  fake_.created.clear_feed_forward();
  EXPECT_EQ(DetailsOf(Client().Get(kName).status()).reason, kMalformedAnswer);
  EXPECT_EQ(DetailsOf(Client().Upload(kName, layer_).status()).reason, kMalformedAnswer);
}

TEST(RemoteRegistryAloneTest, NobodyThereIsUnavailableWithoutAReason) {
  RemoteRegistry registry({.target = "127.0.0.1:1", .timeout = absl::Seconds(5)});
  for (const absl::Status& status :
       {registry.Get(kName).status(), registry.ListAll({}).status(), registry.Delete(kName),
        registry.Upload(kName, SeededLayer()).status(), registry.Download(kName).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(DetailsOf(status).reason, "");
  }
}

}  // namespace
}  // namespace layerd
