// One store, one process: what is taken, refused, kept and removed.
#include "lib/resident/layer_store.h"

#include <sys/stat.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "lib/weights/file_io.h"
#include "tests/lib/layers/int8_testing.h"
#include "tests/lib/resident/store_testing.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kExists = absl::StatusCode::kAlreadyExists;
constexpr auto kAborted = absl::StatusCode::kAborted;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

constexpr char kName[] = "models/m/layers/l";

class LayerStoreTest : public ::testing::Test {
 protected:
  std::string WeightsFile(const Layer& layer) const {
    return folder_.File("weights/" + Sha256Of(AsBytes(SafetensorsOf(layer))) + ".safetensors");
  }
  std::string RecordFileOf(const std::string& model, const std::string& layer) const {
    return folder_.File("layers/" + model + "/" + layer + ".json");
  }

  TemporaryFolder folder_;
  std::unique_ptr<LayerStore> store_ = OpenStore(folder_.path());
};

TEST_F(LayerStoreTest, WhatIsUploadedIsThere) {
  const Layer norm = SeededNorm(1), swiglu = SeededSwiGlu(2, 512, 300, DType::kFloat32);
  const absl::Time before = absl::Now();
  const auto record = Upload(*store_, kName, norm);
  ASSERT_TRUE(record.ok()) << record.status();
  ASSERT_TRUE(Upload(*store_, "models/a/layers/model.layers.0.mlp", swiglu).ok());
  const LayerInfo& info = (*record)->info();
  EXPECT_EQ(info.name, kName);
  EXPECT_TRUE(info.uploaded);
  EXPECT_EQ(info.content_hash, ContentHash(norm));
  EXPECT_EQ(info.weights_sha256, Sha256Of(AsBytes(SafetensorsOf(norm))));
  EXPECT_EQ(info.extent.dim, 8);
  EXPECT_EQ(info.tensors.at("gamma"), "gamma");
  EXPECT_GE(info.create_time, before - absl::Nanoseconds(1));
  EXPECT_LE(info.create_time, absl::Now());
  EXPECT_EQ(std::get<NormalizeLayer>(info.outline).weights.gamma->data(), nullptr);
  ExpectLayer(*store_, kName, norm);
  ExpectLayer(*store_, "models/a/layers/model.layers.0.mlp", swiglu);
  EXPECT_THAT(NamesIn(*store_), ElementsAre("models/a/layers/model.layers.0.mlp", kName));
  EXPECT_EQ(store_->WarningOf("m"), "");
  // The same object, as long as nothing changes.
  EXPECT_EQ(*store_->Find(kName), *record);
  EXPECT_EQ(store_->List()[1], *record);
  ExpectNoStrays(folder_.path(), *store_);
  // And after a restart.
  store_ = nullptr;
  store_ = OpenStore(folder_.path());
  ExpectLayer(*store_, kName, norm);
  EXPECT_EQ((*store_->Find(kName))->info().create_time, info.create_time);
}

TEST_F(LayerStoreTest, TheErrorOfAnInt8LayerIsKeptAndMayBeToldLater) {
  FeedForwardLayer layer;
  layer.weights = SeededInt8Weights(1, layer.spec, 40, 70, /*biases=*/true);
  const auto told = [&] { return std::get<FeedForwardLayer>((*store_->Find(kName))->info().outline).quantization; };
  ASSERT_TRUE(Upload(*store_, kName, layer).ok());
  ExpectLayer(*store_, kName, layer);
  EXPECT_EQ(told(), std::nullopt);
  // The same layer is no other one for being told more of.
  FeedForwardLayer with_error = layer;
  for (const double error : {0.25, 0.125}) {
    with_error.quantization = {.source_hash = std::string(64, 'a'),
                               .matrices = {{"gate", error, 1}, {"up", error, 1}, {"down", error, 1}}};
    const auto record = Upload(*store_, kName, with_error);
    ASSERT_TRUE(record.ok()) << record.status();
    ASSERT_TRUE(told());
    EXPECT_TRUE(told() == with_error.quantization);
  }
  ASSERT_TRUE(Upload(*store_, kName, layer).ok());
  store_ = nullptr;
  store_ = OpenStore(folder_.path());
  EXPECT_TRUE(told() == with_error.quantization) << "kept where nothing new is told, and after a restart";
  ExpectLayer(*store_, kName, layer);
  ExpectNoStrays(folder_.path(), *store_);
}

TEST_F(LayerStoreTest, ChunksOfAnySizeGiveTheSameLayer) {
  const Layer layer = SeededSwiGlu(1, 300, 200, DType::kFloat32);
  const std::string bytes = SafetensorsOf(layer);
  ASSERT_GT(bytes.size(), size_t{700'000});
  for (const size_t chunk : {size_t{1}, size_t{7}, size_t{65'537}, size_t{262'144}, size_t{300'001}, bytes.size()}) {
    const std::string name = absl::StrCat("models/m/layers/chunk", chunk);
    const auto record = UploadBytes(*store_, HeaderOf(name, layer, bytes), bytes, chunk);
    ASSERT_TRUE(record.ok()) << record.status();
    ExpectLayer(*store_, name, layer);
    EXPECT_TRUE(ReadWhole(WeightsFile(layer)) == bytes) << chunk;
    ASSERT_TRUE(store_->Delete(name, std::nullopt).ok());
  }
  ExpectNoStrays(folder_.path(), *store_);
}

TEST_F(LayerStoreTest, RefusesAHeaderBeforeAnyBytes) {
  const Layer layer = SeededNorm(1);
  const std::string bytes = SafetensorsOf(layer);
  const UploadHeader good = HeaderOf(kName, layer, bytes);
  const auto with = [&](auto change) {
    UploadHeader header = good;
    change(header);
    return store_->Begin(header).status();
  };
  for (const std::string& name : std::vector<std::string>{
           "", "m", "models/m", "models/../layers/l", "models/m/layers/..", "models/m/layers/a/b", "/models/m/layers/l",
           std::string("models/m/layers/l\0", 18), std::string(20'000, 'x')}) {
    ExpectStoreError(with([&](auto& h) { h.name = name; }), kInvalid, "LAYER_NAME", "header.name",
                     {"models/{model}/layers/{layer}"});
  }
  for (const int64_t size : {int64_t{-1}, int64_t{0}, int64_t{9}, (int64_t{1} << 42) + 1,
                             std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    ExpectStoreError(with([&](auto& h) { h.size_bytes = size; }), kInvalid, "OUT_OF_RANGE", "header.size_bytes",
                     {absl::StrCat("got ", size)});
  }
  for (const std::string& hash : {std::string(), std::string("abc"), good.sha256 + "0", std::string(64, 'A'),
                                  "../" + good.sha256.substr(3), std::string(20'000, 'a')}) {
    ExpectStoreError(with([&](auto& h) { h.sha256 = hash; }), kInvalid, "SHA256", "header.sha256", {"64 hexadecimal"});
  }
  ExpectStoreError(with([](auto& h) { std::get<NormalizeLayer>(h.layer).spec.rounding = NormRounding::kUnspecified; }),
                   kInvalid, "MISSING", "header.normalize.rounding");
  ExpectStoreError(with([](auto& h) { h.etag = ""; }), kAborted, "ETAG_MISMATCH", "header.etag", {"there is no layer"});
  EXPECT_THAT(FilesIn(folder_.File("uploads")), IsEmpty());
  EXPECT_TRUE(store_->Begin(good).ok());
}

TEST_F(LayerStoreTest, AnErrorStaysAndLeavesNothing) {
  const Layer layer = SeededNorm(1);
  const std::string bytes = SafetensorsOf(layer);
  {
    auto upload = store_->Begin(HeaderOf(kName, layer, bytes));
    ASSERT_TRUE(upload.ok());
    EXPECT_THAT(FilesIn(folder_.File("uploads")), ::testing::SizeIs(1));
    const auto error = (*upload)->Write(AsBytes(bytes + "x"));
    ExpectStoreError(error, kInvalid, "TOO_MANY_BYTES", "chunk");
    // The space is free again at once.
    EXPECT_THAT(FilesIn(folder_.File("uploads")), IsEmpty());
    EXPECT_EQ((*upload)->Write(AsBytes(bytes)), error);
    EXPECT_EQ((*upload)->Write({}), error);
    EXPECT_EQ((*upload)->Commit().status(), error);
  }
  {
    auto upload = store_->Begin(HeaderOf(kName, layer, bytes));
    ASSERT_TRUE(upload.ok());
    ASSERT_TRUE((*upload)->Write(AsBytes(bytes.substr(1, 0))).ok());
    ASSERT_TRUE((*upload)->Write(AsBytes(bytes.substr(0, bytes.size() - 1))).ok());
    const auto error = (*upload)->Commit().status();
    ExpectStoreError(error, kInvalid, "BYTE_COUNT_MISMATCH", "chunk");
    EXPECT_EQ((*upload)->Write(AsBytes("x")), error);
  }
  {
    UploadHeader header = HeaderOf(kName, layer, bytes);
    header.sha256 = std::string(64, '0');
    ExpectStoreError(UploadBytes(*store_, header, bytes).status(), kInvalid, "SHA256_MISMATCH", "header.sha256",
                     {Sha256Of(AsBytes(bytes)), header.sha256});
  }
  {
    auto dropped = store_->Begin(HeaderOf(kName, layer, bytes));
    ASSERT_TRUE(dropped.ok());
    ASSERT_TRUE((*dropped)->Write(AsBytes(bytes)).ok());
  }
  EXPECT_THAT(NamesIn(*store_), IsEmpty());
  ExpectNoStrays(folder_.path(), *store_);
}

TEST_F(LayerStoreTest, AnUploadEndsWithItsCommit) {
  const Layer layer = SeededNorm(1);
  const std::string bytes = SafetensorsOf(layer);
  auto upload = store_->Begin(HeaderOf(kName, layer, bytes));
  ASSERT_TRUE(upload.ok());
  ASSERT_TRUE((*upload)->Write(AsBytes(bytes)).ok());
  ASSERT_TRUE((*upload)->Commit().ok());
  EXPECT_EQ((*upload)->Write(AsBytes("x")).code(), absl::StatusCode::kInternal);
  EXPECT_EQ((*upload)->Commit().status().code(), absl::StatusCode::kInternal);
  ExpectLayer(*store_, kName, layer);
}

TEST_F(LayerStoreTest, AnUploadMayOutliveTheStore) {
  const Layer layer = SeededNorm(1);
  const std::string bytes = SafetensorsOf(layer);
  auto upload = store_->Begin(HeaderOf(kName, layer, bytes));
  ASSERT_TRUE(upload.ok());
  store_ = nullptr;
  ASSERT_TRUE((*upload)->Write(AsBytes(bytes)).ok());
  const auto record = (*upload)->Commit();
  ASSERT_TRUE(record.ok()) << record.status();
  upload->reset();
  EXPECT_EQ(ContentHash((*record)->Read().value()), ContentHash(layer));
}

TEST_F(LayerStoreTest, ATakenNameNeedsTheEtag) {
  const Layer old = SeededNorm(1), other = SeededNorm(2);
  const auto first = Upload(*store_, kName, old);
  ASSERT_TRUE(first.ok());
  const auto exists = Upload(*store_, kName, other).status();
  ExpectStoreError(exists, kExists, "LAYER_EXISTS", "header.name", {"etag", kName});
  EXPECT_EQ(DetailsOf(exists).resource_name, kName);
  for (const std::string& etag : {std::string(), ContentHash(other), std::string(20'000, 'e')}) {
    ExpectStoreError(Upload(*store_, kName, other, etag).status(), kAborted, "ETAG_MISMATCH", "header.etag",
                     {"expected " + ContentHash(old)});
  }
  ExpectLayer(*store_, kName, old);
  const auto second = Upload(*store_, kName, other, ContentHash(old));
  ASSERT_TRUE(second.ok()) << second.status();
  ExpectLayer(*store_, kName, other);
  // The old weights went with the last record that named them, and the old record knows.
  ExpectNoStrays(folder_.path(), *store_);
  EXPECT_EQ((*first)->Read().status().code(), kNotFound);
  ExpectStoreError(Upload(*store_, kName, old, ContentHash(old)).status(), kAborted, "ETAG_MISMATCH", "header.etag");
}

TEST_F(LayerStoreTest, TheSameLayerAgainIsNoError) {
  const Layer layer = SeededNorm(1);
  const auto first = Upload(*store_, kName, layer);
  ASSERT_TRUE(first.ok());
  const auto again = Upload(*store_, kName, layer);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, *first);
  const auto with_etag = Upload(*store_, kName, layer, ContentHash(layer));
  ASSERT_TRUE(with_etag.ok());
  EXPECT_EQ(*with_etag, *first);
  // The default said in so many words is the same; other options with the same weights are not.
  Layer same = layer;
  std::get<NormalizeLayer>(same).spec.epsilon = 1e-6;
  EXPECT_TRUE(Upload(*store_, kName, same).ok());
  Layer other = layer;
  std::get<NormalizeLayer>(other).spec.epsilon = 1e-5;
  EXPECT_EQ(Upload(*store_, kName, other).status().code(), kExists);
  // So is the same content in other bytes: its SHA-256 is not the one that was announced before.
  const std::string padded = SafetensorsOf(layer, 10);
  EXPECT_EQ(UploadBytes(*store_, HeaderOf(kName, layer, padded), padded).status().code(), kExists);
  ExpectNoStrays(folder_.path(), *store_);
}

TEST_F(LayerStoreTest, OfTwoUploadsOfOneNameTheFirstToEndWins) {
  const Layer one = SeededNorm(1), two = SeededNorm(2);
  const std::string one_bytes = SafetensorsOf(one), two_bytes = SafetensorsOf(two);
  auto first = store_->Begin(HeaderOf(kName, one, one_bytes));
  auto second = store_->Begin(HeaderOf(kName, two, two_bytes));
  auto third = store_->Begin(HeaderOf(kName, two, two_bytes));
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  ASSERT_TRUE((*first)->Write(AsBytes(one_bytes)).ok());
  ASSERT_TRUE((*second)->Write(AsBytes(two_bytes)).ok());
  ASSERT_TRUE((*third)->Write(AsBytes(two_bytes)).ok());
  ASSERT_TRUE((*second)->Commit().ok());
  EXPECT_TRUE((*third)->Commit().ok());
  ExpectStoreError((*first)->Commit().status(), kExists, "LAYER_EXISTS", "header.name");
  ExpectLayer(*store_, kName, two);
  // With an etag likewise.
  auto fourth = store_->Begin(HeaderOf(kName, one, one_bytes, ContentHash(two)));
  ASSERT_TRUE(fourth.ok());
  ASSERT_TRUE((*fourth)->Write(AsBytes(one_bytes)).ok());
  ASSERT_TRUE(store_->Delete(kName, std::nullopt).ok());
  ExpectStoreError((*fourth)->Commit().status(), kAborted, "ETAG_MISMATCH", "header.etag", {"there is no layer"});
  ExpectNoStrays(folder_.path(), *store_);
}

TEST_F(LayerStoreTest, TheSameWeightsAreStoredOnce) {
  const Layer layer = SeededNorm(1, 1000);
  Layer other_options = layer;
  std::get<NormalizeLayer>(other_options).spec.rounding = NormRounding::kAfterGamma;
  ASSERT_TRUE(Upload(*store_, "models/a/layers/l", layer).ok());
  ASSERT_TRUE(Upload(*store_, "models/b/layers/l", layer).ok());
  ASSERT_TRUE(Upload(*store_, "models/c/layers/l", other_options).ok());
  EXPECT_THAT(FilesIn(folder_.File("weights")), ::testing::SizeIs(1));
  ExpectNoStrays(folder_.path(), *store_);
  ASSERT_TRUE(store_->Delete("models/a/layers/l", std::nullopt).ok());
  ExpectLayer(*store_, "models/b/layers/l", layer);
  ASSERT_TRUE(Upload(*store_, "models/b/layers/l", SeededNorm(2), ContentHash(layer)).ok());
  ExpectLayer(*store_, "models/c/layers/l", other_options);
  ASSERT_TRUE(store_->Delete("models/c/layers/l", std::nullopt).ok());
  EXPECT_THAT(FilesIn(folder_.File("weights")), ::testing::SizeIs(1));
  ExpectNoStrays(folder_.path(), *store_);
}

TEST_F(LayerStoreTest, DeletesWhatIsThere) {
  const Layer layer = SeededNorm(1);
  const auto record = Upload(*store_, kName, layer);
  ASSERT_TRUE(record.ok());
  ASSERT_TRUE(Upload(*store_, "models/m/layers/other", SeededNorm(2)).ok());
  ExpectStoreError(store_->Delete(kName, ContentHash(SeededNorm(2))), kAborted, "ETAG_MISMATCH", "etag",
                   {ContentHash(layer)});
  ExpectLayer(*store_, kName, layer);
  ASSERT_TRUE(store_->Delete(kName, ContentHash(layer)).ok());
  ExpectStoreError(store_->Find(kName).status(), kNotFound, "LAYER_NOT_FOUND", "name", {kName});
  ExpectStoreError((*record)->Read().status(), kNotFound, "LAYER_NOT_FOUND", "name");
  for (const std::string& name : std::vector<std::string>{kName, "models/x/layers/l", "", "models/../layers/l",
                                                          "models/m/layers/..", std::string(20'000, 'x')}) {
    ExpectStoreError(store_->Delete(name, std::nullopt), kNotFound, "LAYER_NOT_FOUND", "name");
    ExpectStoreError(store_->Find(name).status(), kNotFound, "LAYER_NOT_FOUND", "name");
  }
  EXPECT_THAT(NamesIn(*store_), ElementsAre("models/m/layers/other"));
  ASSERT_TRUE(store_->Delete("models/m/layers/other", std::nullopt).ok());
  // The model's folder goes with its last layer.
  ExpectNoStrays(folder_.path(), *store_);
  EXPECT_THAT(FilesIn(folder_.File("layers")), IsEmpty());
  // The name is free again.
  ASSERT_TRUE(Upload(*store_, kName, SeededNorm(3)).ok());
  ExpectLayer(*store_, kName, SeededNorm(3));
}

TEST_F(LayerStoreTest, TheQuotaCountsWeightsAndUploadsUnderWay) {
  const Layer one = SeededNorm(1, 100), two = SeededNorm(2, 100);
  const std::string one_bytes = SafetensorsOf(one), two_bytes = SafetensorsOf(two);
  const auto size = static_cast<int64_t>(one_bytes.size());
  ASSERT_EQ(two_bytes.size(), one_bytes.size());
  store_ = OpenStore(folder_.path(), 2 * size + 1);
  ASSERT_TRUE(Upload(*store_, kName, one).ok());
  auto upload = store_->Begin(HeaderOf("models/m/layers/two", two, two_bytes));
  ASSERT_TRUE(upload.ok()) << upload.status();
  const auto full = store_->Begin(HeaderOf("models/m/layers/three", two, two_bytes)).status();
  ExpectStoreError(full, kExhausted, "STORE_FULL", "header.size_bytes",
                   {"at most 1 bytes", "--layer_store_mib", absl::StrCat("got ", size)});
  EXPECT_EQ(DetailsOf(full).retry_delay_ms, -1);
  // A replacement needs room for both as long as it lasts.
  ExpectStoreError(store_->Begin(HeaderOf(kName, two, two_bytes, ContentHash(one))).status(), kExhausted, "STORE_FULL",
                   "header.size_bytes");
  // Another store over the folder has its own quota, and counts the same files.
  EXPECT_TRUE(OpenStore(folder_.path(), 3 * size)->Begin(HeaderOf("models/m/layers/x", two, two_bytes)).ok());
  EXPECT_FALSE(OpenStore(folder_.path(), 3 * size - 1)->Begin(HeaderOf("models/m/layers/x", two, two_bytes)).ok());
  upload->reset();
  ASSERT_TRUE(Upload(*store_, kName, two, ContentHash(one)).ok());
  // Freed by the replacement; counted once for two names.
  ASSERT_TRUE(Upload(*store_, "models/m/layers/two", two).ok());
  ASSERT_TRUE(Upload(*store_, "models/m/layers/three", two).ok());
  ASSERT_TRUE(Upload(*store_, "models/m/layers/one", one).ok());
  EXPECT_FALSE(Upload(*store_, "models/m/layers/four", SeededNorm(4, 100)).ok());
  ASSERT_TRUE(store_->Delete("models/m/layers/one", std::nullopt).ok());
  EXPECT_TRUE(Upload(*store_, "models/m/layers/four", SeededNorm(4, 100)).ok());
  ExpectNoStrays(folder_.path(), *store_);
}

TEST_F(LayerStoreTest, ADamagedRecordIsListedAndCanOnlyBeDeleted) {
  const Layer layer = SeededNorm(1), other = SeededNorm(2);
  ASSERT_TRUE(Upload(*store_, kName, layer).ok());
  ASSERT_TRUE(Upload(*store_, "models/m/layers/other", other).ok());
  const std::string whole = ReadWhole(RecordFileOf("m", "l"));
  folder_.Write("layers/m/l.json", whole.substr(0, 100));
  const auto record = store_->Find(kName);
  ASSERT_TRUE(record.ok()) << record.status();
  ExpectStoreError((*record)->info().status, kPrecondition, "LAYER_DAMAGED", "", {kName, "not JSON"});
  EXPECT_EQ((*record)->Read().status(), (*record)->info().status);
  EXPECT_EQ(*store_->Find(kName), *record);
  EXPECT_THAT(NamesIn(*store_), ElementsAre(kName, "models/m/layers/other"));
  EXPECT_EQ(store_->List()[0], *record);
  ExpectLayer(*store_, "models/m/layers/other", other);
  for (const Layer& one : {layer, other}) {
    ExpectStoreError(Upload(*store_, kName, one).status(), kExists, "LAYER_EXISTS", "header.name",
                     {"damaged", "delete it first"});
    ExpectStoreError(Upload(*store_, kName, one, ContentHash(layer)).status(), kAborted, "ETAG_MISMATCH", "header.etag",
                     {"damaged"});
    ExpectStoreError(Upload(*store_, kName, one, "").status(), kAborted, "ETAG_MISMATCH", "header.etag", {"damaged"});
  }
  ExpectStoreError(store_->Delete(kName, ContentHash(layer)), kAborted, "ETAG_MISMATCH", "etag", {"damaged"});
  // Nobody knows which weights it named: they stay, so that a repaired record has them.
  store_ = OpenStore(folder_.path());
  ASSERT_TRUE(store_->Delete("models/m/layers/other", std::nullopt).ok());
  EXPECT_TRUE(std::filesystem::exists(WeightsFile(other)));
  folder_.Write("layers/m/l.json", whole);
  ExpectLayer(*store_, kName, layer);
  folder_.Write("layers/m/l.json", "");
  ASSERT_TRUE(store_->Delete(kName, std::nullopt).ok());
  ExpectNoStrays(folder_.path(), *store_);
  EXPECT_THAT(FilesIn(folder_.File("weights")), IsEmpty());
}

TEST_F(LayerStoreTest, ARecordThatNamesOtherWeightsDoesNotLoseItsOwn) {
  const Layer layer = SeededNorm(1);
  ASSERT_TRUE(Upload(*store_, kName, layer).ok());
  ASSERT_TRUE(Upload(*store_, "models/m/layers/other", SeededNorm(2)).ok());
  const std::string whole = ReadWhole(RecordFileOf("m", "l"));
  std::string spoilt = whole;  // one bit, in what neither its form nor the content hash guards
  char& digit = spoilt[spoilt.find(Sha256Of(AsBytes(SafetensorsOf(layer))))];
  digit = digit == '1' ? '3' : '1';
  folder_.Write("layers/m/l.json", spoilt);
  store_ = OpenStore(folder_.path());
  ExpectStoreError(store_->Find(kName).value()->Read().status(), kPrecondition, "LAYER_DAMAGED", "", {"is gone"});
  ASSERT_TRUE(store_->Delete("models/m/layers/other", std::nullopt).ok());
  folder_.Write("layers/m/l.json", whole);
  ExpectLayer(*store_, kName, layer);
}

TEST_F(LayerStoreTest, DamagedWeightsAreFoundAndMended) {
  const Layer layer = SeededSwiGlu(1);
  const auto record = Upload(*store_, kName, layer);
  ASSERT_TRUE(record.ok());
  const std::string bytes = ReadWhole(WeightsFile(layer));
  std::string spoilt = bytes;
  spoilt.back() ^= 1;
  const auto expect_damage = [&](const std::string& part) {
    ExpectStoreError((*record)->Read().status(), kPrecondition, "LAYER_DAMAGED", "", {kName, part});
  };
  const std::string path = WeightsFile(layer);
  folder_.Write("weights/" + BaseName(path), spoilt);
  expect_damage("the tensor ");
  folder_.Write("weights/" + BaseName(path), bytes.substr(0, bytes.size() - 1));
  expect_damage("expected a file of ");
  std::filesystem::remove(path);
  expect_damage("the file of its weights is gone");
  std::filesystem::create_directory(path);
  expect_damage("expected a file of ");
  std::filesystem::remove(path);
  std::filesystem::create_symlink(folder_.Write("elsewhere", bytes), path);
  expect_damage("the file of its weights is gone");
  ASSERT_EQ(mkfifo((path + "x").c_str(), 0600), 0);
  std::filesystem::rename(path + "x", path);
  expect_damage("expected a file of ");
  // The same layer again puts good weights in their place.
  ASSERT_TRUE(Upload(*store_, kName, layer).ok());
  EXPECT_EQ(ContentHash((*record)->Read().value()), ContentHash(layer));
}

TEST_F(LayerStoreTest, NoLinkInTheStoreIsFollowed) {
  const Layer layer = SeededNorm(1), other = SeededNorm(2);
  ASSERT_TRUE(Upload(*store_, kName, layer).ok());
  const std::string record = ReadWhole(RecordFileOf("m", "l"));
  // A record, and a model's folder.
  const std::string outside = folder_.Write("outside.json", record);
  std::filesystem::remove(RecordFileOf("m", "l"));
  std::filesystem::create_symlink(outside, RecordFileOf("m", "l"));
  std::filesystem::create_directory(folder_.File("elsewhere"));
  folder_.Write("elsewhere/l.json", record);
  std::filesystem::create_directory_symlink(folder_.File("elsewhere"), folder_.File("layers/linked"));
  EXPECT_THAT(NamesIn(*store_), IsEmpty());
  EXPECT_EQ(store_->Find(kName).status().code(), kNotFound);
  EXPECT_EQ(store_->Find("models/linked/layers/l").status().code(), kNotFound);
  EXPECT_EQ(store_->Delete("models/linked/layers/l", std::nullopt).code(), kNotFound);
  EXPECT_THAT(store_->WarningOf("linked"), StartsWith("layer_store: the model's folder cannot be used"));
  EXPECT_EQ(store_->WarningOf("m"), "");
  EXPECT_EQ(store_->WarningOf("nothing"), "");
  EXPECT_EQ(store_->WarningOf("../.."), "");
  // A new layer takes the link's place, and what it pointed to stays as it was.
  ASSERT_TRUE(Upload(*store_, kName, other).ok());
  ExpectLayer(*store_, kName, other);
  EXPECT_EQ(ReadWhole(outside), record);
  ExpectStoreError(Upload(*store_, "models/linked/layers/x", other).status(), absl::StatusCode::kInternal, "STORE_IO",
                   "layer_store", {"layers/linked/x.json"});
  EXPECT_THAT(FilesIn(folder_.File("elsewhere")), ElementsAre("l.json"));
  EXPECT_THAT(FilesIn(folder_.File("uploads")), IsEmpty());
}

TEST_F(LayerStoreTest, WhatIsNotTheStoresStays) {
  ASSERT_TRUE(Upload(*store_, kName, SeededNorm(1)).ok());
  for (const char* path : {"README", "layers/README", "layers/m/README", "layers/m/.hidden.json", "layers/m/a b.json",
                           "layers/.hidden", "weights/README", "weights/abc.safetensors"}) {
    folder_.Write(path, "x");
  }
  std::filesystem::create_directories(folder_.File("layers/m/folder.json"));
  std::filesystem::create_directories(folder_.File("layers/m2/folder"));
  std::filesystem::create_directories(folder_.File("layers/.empty"));
  const auto before = FilesIn(folder_.path());
  store_ = OpenStore(folder_.path());
  EXPECT_EQ(FilesIn(folder_.path()), before);
  EXPECT_THAT(NamesIn(*store_), ElementsAre(kName));
  EXPECT_EQ(store_->Find("models/m/layers/folder").status().code(), kNotFound);
}

TEST_F(LayerStoreTest, OpenRemovesWhatBelongsToNothing) {
  ASSERT_TRUE(Upload(*store_, kName, SeededNorm(1)).ok());
  const auto before = FilesIn(folder_.path());
  folder_.Write("uploads/77-0.partial", "half");
  folder_.Write("uploads/record.json", "{");
  folder_.Write("weights/" + std::string(64, 'a') + ".safetensors", "weights");
  std::filesystem::create_directory(folder_.File("layers/empty"));
  store_ = OpenStore(folder_.path());
  EXPECT_EQ(FilesIn(folder_.path()), before);
  // An upload that lost its writer does not count either, before anyone opens the store again.
  folder_.Write("uploads/77-0.partial", std::string(1000, 'x'));
  store_ = OpenStore(folder_.path(), 1000);
  folder_.Write("uploads/77-0.partial", std::string(1000, 'x'));
  EXPECT_TRUE(Upload(*store_, "models/m/layers/other", SeededNorm(2)).ok());
  ExpectNoStrays(folder_.path(), *store_);
}

TEST(LayerStoreOpen, SaysWhatItNeeds) {
  TemporaryFolder folder;
  const auto open = [](const std::string& path) { return LayerStore::Open(path, {}).status(); };
  ExpectStoreError(open(folder.File("absent")), kPrecondition, "STORE_UNUSABLE", "layer_store",
                   {"No such file", "absent"});
  ExpectStoreError(open(folder.Write("file", "x")), kPrecondition, "STORE_UNUSABLE", "layer_store",
                   {"Not a directory"});
  ExpectStoreError(open(std::string("a\0b", 3)), kPrecondition, "STORE_UNUSABLE", "layer_store");
  std::filesystem::create_directories(folder.File("store"));
  std::filesystem::create_directory_symlink(folder.path(), folder.File("store/weights"));
  ExpectStoreError(open(folder.File("store")), kPrecondition, "STORE_UNUSABLE", "layer_store", {"store/weights"});
  std::filesystem::remove(folder.File("store/weights"));
  std::filesystem::create_directory(folder.File("store/lock"));
  ExpectStoreError(open(folder.File("store")), kPrecondition, "STORE_UNUSABLE", "layer_store", {"store/lock"});
  std::filesystem::remove(folder.File("store/lock"));
  EXPECT_TRUE(open(folder.File("store")).ok());
}

}  // namespace
}  // namespace layerd
