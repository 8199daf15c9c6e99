#include "lib/resident/store_record.h"

#include <fcntl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "lib/resident/store_files.h"
#include "lib/resident/upload_reader.h"
#include "tests/lib/layers/int8_testing.h"
#include "tests/lib/resident/store_testing.h"

namespace layerd {
namespace {

using ::testing::HasSubstr;

const LayerName kName = {"m", "l"};

StoredLayer StoredFrom(const Layer& layer, const std::string& bytes) {
  UploadReader reader(OptionsOf(layer), static_cast<int64_t>(bytes.size()));
  EXPECT_TRUE(reader.Take(AsBytes(bytes)).ok());
  StoredLayer stored = reader.Finish().value();
  stored.info.name = kName.Full();
  stored.info.create_time = absl::FromUnixSeconds(1'700'000'000) + absl::Nanoseconds(120);
  return stored;
}

StoredLayer StoredNorm() {
  NormalizeLayer norm;
  norm.spec.rounding = NormRounding::kBeforeGamma;
  norm.weights.gamma = Tensor::FromFloats(DType::kFloat32, {2}, {1, -2});
  return StoredFrom(norm, SafetensorsOf(norm));
}

// The form on the disk is a promise to stores that are there.
TEST(StoreRecord, HasThisText) {
  const StoredLayer stored = StoredNorm();
  EXPECT_EQ(RecordText(stored), absl::StrCat(R"({
 "content_hash": "f9630bf2d55edc2064e3d0898a53746c8df650709d7fc81cb5524647835706c8",
 "create_time": "2023-11-14T22:13:20.000000120Z",
 "name": "models/m/layers/l",
 "normalize": {
  "epsilon": 1e-06,
  "kind": "rms_norm",
  "rounding": "before_gamma"
 },
 "sha256": ")",
                                             stored.info.weights_sha256, R"(",
 "size_bytes": 80,
 "version": 1,
 "weights": [
  {
   "begin": 72,
   "dtype": "F32",
   "end": 80,
   "role": "gamma",
   "sha256": ")",
                                             stored.tensors[0].sha256, R"(",
   "shape": [
    2
   ]
  }
 ]
}
)"));
}

TEST(StoreRecord, ComesBack) {
  for (const Layer& layer : {SeededNorm(1), SeededSwiGlu(2)}) {
    const StoredLayer stored = StoredFrom(layer, SafetensorsOf(layer));
    const StoredLayer back = ParseRecord(kName, RecordText(stored));
    ASSERT_TRUE(back.info.status.ok()) << back.info.status;
    EXPECT_EQ(RecordText(back), RecordText(stored));
    EXPECT_EQ(back.info.content_hash, ContentHash(layer));
    EXPECT_EQ(back.info.create_time, stored.info.create_time);
    EXPECT_TRUE(back.info.uploaded);
    EXPECT_EQ(back.info.tensors.size(), WeightsOf(layer).size());
    EXPECT_EQ(back.info.extent.weight_bytes, stored.info.extent.weight_bytes);
    EXPECT_EQ(back.info.extent.dim, CheckLayer(layer)->dim);
  }
}

TEST(StoreRecord, OfAnInt8LayerIsOfVersion2AndTellsItsError) {
  FeedForwardLayer layer;
  layer.weights = SeededInt8Weights(1, layer.spec, 40, 7, /*biases=*/true);
  for (const bool told : {false, true}) {
    if (told) {
      layer.quantization = {.source_hash = std::string(64, 'a'),
                            .matrices = {{"gate", 0.1, 0.2}, {"up", 0.3, 0.4}, {"down", 0, 1e-9}},
                            .output_relative_rms_error = 0.0071,
                            .rows = 16,
                            .seed = 1};
    }
    const StoredLayer stored = StoredFrom(layer, SafetensorsOf(layer));
    const std::string text = RecordText(stored);
    EXPECT_THAT(text, HasSubstr("\"version\": 2,"));
    const StoredLayer back = ParseRecord(kName, text);
    ASSERT_TRUE(back.info.status.ok()) << back.info.status;
    EXPECT_EQ(RecordText(back), text);
    EXPECT_EQ(back.info.content_hash, ContentHash(layer));
    EXPECT_EQ(back.info.extent.parameters, 3 * 40 * 7 + 2 * 7 + 40);
    EXPECT_TRUE(std::get<FeedForwardLayer>(back.info.outline).quantization == layer.quantization);
  }
  const std::string text = RecordText(StoredFrom(layer, SafetensorsOf(layer)));
  for (const auto& [from, to, part] :
       {std::tuple("\"rows\": 16", "\"rows\": -16", "quantization.rows: expected a whole number"),
        {"\"rows\": 16", "\"lines\": 16", "quantization.rows"},
        {"\"role\": \"down\"\n   }\n  ],", "\"role\": \"gate_up\"\n   }\n  ],", "expected"},
        {"aaaaaa", "AAAAAA", "quantization.source_hash: expected 64 hexadecimal digits"}}) {
    const StoredLayer damaged = ParseRecord(kName, absl::StrReplaceAll(text, {{from, to}}));
    ExpectStoreError(damaged.info.status, absl::StatusCode::kFailedPrecondition, "LAYER_DAMAGED", "", {part});
  }
}

TEST(StoreRecord, DamageIsFoundAndNamed) {
  const std::string text = RecordText(StoredNorm());
  const std::string other_hash(64, '0');
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = absl::StrReplaceAll(text, {{from, to}});
    EXPECT_TRUE(changed != text) << from;
    return changed;
  };
  const std::vector<std::pair<std::string, std::string>> damaged = {
      {"", "not JSON"},
      {text.substr(0, text.size() / 2), "not JSON"},
      {std::string(text.size(), '\0'), "NUL"},
      {"[]", "expected an object"},
      {"{}", "version: expected a value"},
      {text + std::string(kMaxRecordBytes, ' '), "expected at most 1048576 bytes"},
      {with("\"version\": 1", "\"version\": 3"), "version: expected 1 or 2; a newer server"},
      {with("\"version\": 1,", "\"version\": 1, \"quantization\": {},"), "expected no other keys"},
      {with("\"version\": 1,", "\"version\": 2, \"quantization\": {},"), "quantization: expected nothing, since"},
      {with("\"version\": 1", "\"version\": \"1\""), "version: expected a whole number"},
      {with("\"version\": 1", "\"version\": -1"), "version: expected a whole number"},
      {with("\"version\": 1,", "\"version\": 1, \"version\": 1,"), "\"version\" stands there twice"},
      {with("\"version\": 1,", "\"version\": 1, \"more\": 1,"), "expected no other keys"},
      {with("models/m/layers/l", "models/m/layers/x"), "name: expected the name of the file"},
      {with("models/m/layers/l", "models/../layers/l"), "name: expected the name of the file"},
      {with("\"name\": \"models/m/layers/l\"", "\"name\": null"), "name: expected a string"},
      {with("\"size_bytes\": 80", "\"size_bytes\": 79"), "weights.end: expected a whole number of 0 to 79"},
      {with("\"size_bytes\": 80", "\"size_bytes\": 8.0e1"), "size_bytes: expected a whole number"},
      {with("\"size_bytes\": 80", "\"size_bytes\": 18446744073709551615"), "size_bytes: expected a whole number"},
      {with("\"rms_norm\"", "\"rmsnorm\""), "normalize.kind: expected one of"},
      {with("\"rms_norm\"", "\"layer_norm\""), "content_hash: expected that of"},
      {with("1e-06", "1e-05"), "content_hash: expected that of"},
      {with("\"rounding\": \"before_gamma\"", "\"gamma_offset\": 0"), "spec.rounding: expected"},
      {with("\"normalize\"", "\"feed_forward\""), "feed_forward.form"},
      {with("\"normalize\"", "\"norm\""), "normalize: expected either"},
      {with("\"F32\"", "\"F64\""), "weights.dtype: expected F32, F16, BF16 or I8"},
      {with("\"F32\"", "\"F16\""), "weights.gamma: expected as many bytes"},
      {with("\"gamma\"", "\"beta\""), "weights.gamma: expected"},
      {with("\"gamma\"", "\"delta\""), "weights.delta: expected weights named"},
      {with("\"begin\": 72", "\"begin\": 60"), "weights.gamma: expected as many bytes"},
      {with("\"begin\": 72", "\"begin\": 81"), "weights.begin: expected a whole number of 0 to 80"},
      {with("\"begin\": 72,", ""), "weights.begin: expected a value"},
      {with("\"begin\": 72,", "\"begin\": 72, \"middle\": 1,"), "weights: expected no other keys"},
      {with("2\n   ]", "2, 1\n   ]"), "weights.gamma.shape: expected [d]"},
      {with("2\n   ]", "-2\n   ]"), "weights.shape: expected dimensions"},
      {with("2\n   ]", "9223372036854775807\n   ]"), "weights.shape: expected dimensions"},
      {with("2\n   ]", "2147483647, 2147483647\n   ]"), "weights.gamma.shape"},
      {with("[\n    2\n   ]", "2"), "weights.shape: expected a list"},
      {with(StoredNorm().tensors[0].sha256, other_hash), "content_hash: expected that of"},
      {with(StoredNorm().tensors[0].sha256, "0"), "weights.sha256: expected a SHA-256"},
      {with(StoredNorm().info.weights_sha256, "../../../etc/passwd"), "sha256: expected a SHA-256"},
      {with(StoredNorm().info.content_hash, other_hash), "content_hash: expected that of"},
      {with("2023-11-14T22:13:20.000000120Z", "yesterday"), "create_time: expected a time"},
      {with("2023-11-14T22:13:20.000000120Z", "2023-13-14T22:13:20.000000120Z"), "create_time: expected a time"},
      {with("\"weights\": [", "\"weights\": {}, \"x\": ["), "weights: expected a list"},
      {text.substr(0, text.rfind(" {\n   \"begin\"")) + "1]}", "weights: expected an object"},
      {text.substr(0, text.rfind(" {\n   \"begin\"")) + "]}", "weights.gamma: expected a tensor"},
  };
  for (const auto& [record, part] : damaged) {
    const StoredLayer layer = ParseRecord(kName, record);
    EXPECT_EQ(layer.info.name, "models/m/layers/l");
    EXPECT_TRUE(layer.info.uploaded);
    EXPECT_EQ(layer.info.content_hash, "");
    ExpectStoreError(layer.info.status, absl::StatusCode::kFailedPrecondition, "LAYER_DAMAGED", "",
                     {"the layer \"models/m/layers/l\" is damaged: its record: ", part});
    EXPECT_EQ(DetailsOf(layer.info.status).resource_name, "models/m/layers/l");
  }
  // One tensor twice.
  StoredLayer twice = StoredNorm();
  twice.tensors.push_back(twice.tensors[0]);
  EXPECT_THAT(std::string(ParseRecord(kName, RecordText(twice)).info.status.message()), HasSubstr("got two"));
}

TEST(StoreRecord, EveryByteOfTheWeightsIsGuarded) {
  TemporaryFolder folder;
  const Layer layer = SeededSwiGlu(3, 2, 3);
  const std::string bytes = SafetensorsOf(layer);
  const StoredLayer stored = StoredFrom(layer, bytes);
  // By two bytes at a time, so that no read is the whole of a weight.
  const auto read_from = [&](const std::string& path) -> absl::StatusOr<Layer> {
    auto reader = StoreReader::Open(stored, Descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC)));
    if (!reader.ok()) return reader.status();
    Layer result = stored.info.outline;
    for (const auto& [role, outline] : WeightsOf(stored.info.outline)) {
      Tensor weight = Tensor::Allocate(outline.dtype(), outline.shape());
      for (size_t at = 0; at < weight.num_bytes(); at += 2) {
        auto status = (*reader)->Next(role, absl::MakeSpan(weight.mutable_data() + at, 2));
        if (!status.ok()) return status;
      }
      if (auto status = SetWeight(result, role, weight); !status.ok()) return status;
    }
    if (auto status = (*reader)->Finish(); !status.ok()) return status;
    return result;
  };
  const auto read = [&](const std::string& changed) { return read_from(folder.Write("w", changed)); };
  const auto whole = read(bytes);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(ContentHash(*whole), ContentHash(layer));
  size_t guarded = 0;
  for (const StoredTensor& tensor : stored.tensors) {
    for (int64_t at = tensor.begin; at < tensor.end; ++at, ++guarded) {
      std::string changed = bytes;
      changed[at] ^= 0x10;
      ExpectStoreError(read(changed).status(), absl::StatusCode::kFailedPrecondition, "LAYER_DAMAGED", "",
                       {absl::StrCat("the tensor ", tensor.role, " is not what it was")});
    }
  }
  EXPECT_EQ(static_cast<int64_t>(guarded), CheckLayer(layer)->weight_bytes);
  for (const std::string& changed : {std::string(), bytes.substr(1), bytes + "x"}) {
    ExpectStoreError(read(changed).status(), absl::StatusCode::kFailedPrecondition, "LAYER_DAMAGED", "",
                     {absl::StrCat("expected a file of ", bytes.size(), " bytes")});
  }
  ExpectStoreError(read_from(folder.path()).status(), absl::StatusCode::kFailedPrecondition, "LAYER_DAMAGED", "");
}

}  // namespace
}  // namespace layerd
