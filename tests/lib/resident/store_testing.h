// Layers for the tests of the layer store, as callers upload them, and what is to be seen of a store from outside.
#ifndef LAYERD_TESTS_LIB_RESIDENT_STORE_TESTING_H_
#define LAYERD_TESTS_LIB_RESIDENT_STORE_TESTING_H_

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lib/base/errors.h"
#include "lib/layers/seeded.h"
#include "lib/resident/layer_store.h"
#include "lib/weights/layer_hash.h"
#include "lib/weights/safetensors.h"
#include "tests/lib/weights/test_files.h"

namespace layerd {

inline absl::Span<const std::byte> AsBytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// The safetensors bytes of a layer. `padding` makes the header longer by a note of so many bytes.
inline std::string SafetensorsOf(const Layer& layer, size_t padding = 0) {
  std::map<std::string, Tensor> tensors;
  for (const auto& [role, tensor] : WeightsOf(layer)) tensors.emplace(role, tensor);
  std::map<std::string, std::string> metadata;
  if (padding > 0) metadata.emplace("note", std::string(padding, 'n'));
  const auto ordered = InFileOrder(tensors);
  std::string bytes = SafetensorsHead(ordered, metadata, "test").value();
  for (const auto& [role, tensor] : ordered) {
    bytes.append(reinterpret_cast<const char*>(tensor.data()), tensor.num_bytes());
  }
  return bytes;
}

inline Layer SeededNorm(uint64_t seed, int64_t dim = 8, DType dtype = DType::kFloat32) {
  NormalizeLayer layer;
  layer.spec.rounding = NormRounding::kBeforeGamma;
  layer.weights.gamma = SeededGamma(seed, dtype, dim);
  return layer;
}

inline Layer SeededSwiGlu(uint64_t seed, int64_t dim = 6, int64_t hidden_dim = 10, DType dtype = DType::kBFloat16) {
  return FeedForwardLayer{SwiGluSpec(),
                          SeededFeedForwardWeights(seed, SwiGluSpec(), dtype, dim, hidden_dim, /*biases=*/true)};
}

inline UploadHeader HeaderOf(const std::string& name, const Layer& layer, const std::string& bytes,
                             std::optional<std::string> etag = std::nullopt) {
  return {.name = name,
          .layer = layer,
          .size_bytes = static_cast<int64_t>(bytes.size()),
          .sha256 = Sha256Of(AsBytes(bytes)),
          .etag = std::move(etag)};
}

// Uploads `bytes` in chunks of `chunk_bytes`.
inline absl::StatusOr<std::shared_ptr<const LayerRecord>> UploadBytes(LayerStore& store, const UploadHeader& header,
                                                                      std::string_view bytes,
                                                                      size_t chunk_bytes = size_t{1} << 30) {
  const auto upload = store.Begin(header);
  if (!upload.ok()) return upload.status();
  for (size_t at = 0; at < bytes.size(); at += chunk_bytes) {
    if (auto status = (*upload)->Write(AsBytes(bytes.substr(at, chunk_bytes))); !status.ok()) return status;
  }
  return (*upload)->Commit();
}

inline absl::StatusOr<std::shared_ptr<const LayerRecord>> Upload(LayerStore& store, const std::string& name,
                                                                 const Layer& layer,
                                                                 std::optional<std::string> etag = std::nullopt) {
  const std::string bytes = SafetensorsOf(layer);
  return UploadBytes(store, HeaderOf(name, layer, bytes, std::move(etag)), bytes);
}

inline std::unique_ptr<LayerStore> OpenStore(const std::string& folder, int64_t max_bytes = int64_t{1} << 40) {
  auto store = LayerStore::Open(folder, {.max_bytes = max_bytes});
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

// `name` is there and is `layer`, to the bit.
inline void ExpectLayer(LayerStore& store, const std::string& name, const Layer& layer) {
  const auto record = store.Find(name);
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ((*record)->info().content_hash, ContentHash(layer));
  const auto read = (*record)->Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ContentHash(*read), ContentHash(layer));
}

inline void ExpectStoreError(const absl::Status& status, absl::StatusCode code, const std::string& reason,
                             const std::string& field, std::initializer_list<std::string> parts = {}) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(DetailsOf(status).reason, reason) << status;
  EXPECT_EQ(DetailsOf(status).field, field) << status;
  EXPECT_LE(status.message().size(), kMaxErrorTextBytes + 3);
  EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(field.empty() ? "" : field + ": "));
  for (const std::string& part : parts) EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
}

// Where thousands of synced files take no time: a file system in memory, if there is one.
inline std::string QuickFolder() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ::testing::TempDir(); }

// Everything in a folder, folders with a slash at their end.
inline std::set<std::string> FilesIn(const std::string& folder) {
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string path = std::filesystem::relative(entry.path(), folder);
    files.insert(entry.is_directory() && !entry.is_symlink() ? path + "/" : path);
  }
  return files;
}

// Every file of the store belongs to a layer in it.
inline void ExpectNoStrays(const std::string& folder, LayerStore& store) {
  std::set<std::string> expected = {"layers/", "weights/", "uploads/", "lock"};
  for (const auto& record : store.List()) {
    const std::string name = record->info().name.substr(std::string("models/").size());
    const std::string model = name.substr(0, name.find('/'));
    expected.insert(absl::StrCat("layers/", model, "/"));
    expected.insert(absl::StrCat("layers/", model, "/", name.substr(name.rfind('/') + 1), ".json"));
    expected.insert(absl::StrCat("weights/", record->info().weights_sha256, ".safetensors"));
  }
  EXPECT_EQ(FilesIn(folder), expected);
}

inline std::vector<std::string> NamesIn(LayerStore& store) {
  std::vector<std::string> names;
  for (const auto& record : store.List()) names.push_back(record->info().name);
  return names;
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_RESIDENT_STORE_TESTING_H_
