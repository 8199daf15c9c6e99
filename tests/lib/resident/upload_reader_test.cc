#include "lib/resident/upload_reader.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/lib/layers/int8_testing.h"
#include "tests/lib/resident/store_testing.h"

namespace layerd {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::Status TakeAll(UploadReader& reader, std::string_view bytes, size_t chunk_bytes) {
  for (size_t at = 0; at < bytes.size(); at += chunk_bytes) {
    const std::string_view chunk = bytes.substr(at, chunk_bytes);
    // A copy of exactly the chunk's size, so that AddressSanitizer sees a read past its end.
    const std::vector<char> copy(chunk.begin(), chunk.end());
    if (auto status = reader.Take(AsBytes({copy.data(), copy.size()})); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<StoredLayer> ReadUpload(const Layer& layer, const std::string& bytes, size_t chunk_bytes) {
  UploadReader reader(OptionsOf(layer), static_cast<int64_t>(bytes.size()));
  if (auto status = TakeAll(reader, bytes, chunk_bytes); !status.ok()) return status;
  return reader.Finish();
}

void ExpectUpload(const StoredLayer& read, const Layer& layer, const std::string& bytes) {
  EXPECT_EQ(read.info.weights_sha256, Sha256Of(AsBytes(bytes)));
  EXPECT_EQ(read.info.content_hash, ContentHash(layer));
  EXPECT_EQ(read.size_bytes, static_cast<int64_t>(bytes.size()));
  ASSERT_EQ(read.tensors.size(), WeightsOf(layer).size());
  for (const StoredTensor& tensor : read.tensors) {
    EXPECT_EQ(tensor.sha256, Sha256Of(AsBytes(bytes.substr(tensor.begin, tensor.end - tensor.begin))));
  }
}

TEST(UploadReader, ReadsEveryKindOfLayer) {
  NormalizeLayer norm = std::get<NormalizeLayer>(SeededNorm(1, 5, DType::kFloat16));
  norm.weights.beta = SeededBeta(1, DType::kFloat32, 5);
  FeedForwardLayer packed;
  packed.spec.packing = GateUpPacking::kHalves;
  packed.weights = SeededFeedForwardWeights(1, packed.spec, DType::kBFloat16, 3, 7, /*biases=*/true);
  FeedForwardLayer int8;
  int8.weights = SeededInt8Weights(1, int8.spec, 40, 7, /*biases=*/true);
  for (const Layer& layer : {Layer(norm), SeededSwiGlu(1), Layer(packed), Layer(int8)}) {
    const std::string bytes = SafetensorsOf(layer);
    const auto read = ReadUpload(layer, bytes, bytes.size());
    ASSERT_TRUE(read.ok()) << read.status();
    ExpectUpload(*read, layer, bytes);
  }
}

// The same file with a header of `length` bytes, spaces at its end included.
std::string WithHeaderLength(const std::string& bytes, uint64_t length) {
  uint64_t before;
  std::memcpy(&before, bytes.data(), sizeof(before));
  std::string json = bytes.substr(8, before);
  json.resize(json.rfind('}') + 1);
  EXPECT_LE(json.size(), length);
  json.resize(length, ' ');
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + json + bytes.substr(8 + before);
}

TEST(UploadReader, TheChunksMakeNoDifference) {
  const Layer layer = SeededSwiGlu(2);
  const std::string note = SafetensorsOf(layer, /*padding=*/99'000);
  for (uint64_t length = 99'993; length <= 100'008; ++length) {
    const std::string bytes = WithHeaderLength(note, length);
    for (const size_t chunk : {size_t{1}, size_t{7}, size_t{8}, size_t{9}, bytes.size()}) {
      const auto read = ReadUpload(layer, bytes, chunk);
      ASSERT_TRUE(read.ok()) << read.status() << " header " << length << " chunk " << chunk;
      ExpectUpload(*read, layer, bytes);
    }
  }
}

// A file of `json` and as many bytes of data; the error that it gives, which must come with its byte `at`.
absl::Status ErrorAt(const Layer& options, const std::string& bytes, size_t at) {
  UploadReader reader(OptionsOf(options), static_cast<int64_t>(bytes.size()));
  absl::Status status;
  size_t taken = 0;
  while (status.ok() && taken < bytes.size()) status = reader.Take(AsBytes(bytes.substr(taken++, 1)));
  EXPECT_EQ(taken, at) << status;
  return status;
}

std::string Length(uint64_t length) { return {reinterpret_cast<const char*>(&length), sizeof(length)}; }

TEST(UploadReader, RefusesALengthWithItsLastByte) {
  const std::string rest(92, ' ');
  for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{93}, uint64_t{1} << 32, uint64_t{1} << 63,
                                std::numeric_limits<uint64_t>::max()}) {
    ExpectStoreError(ErrorAt(SeededNorm(1), Length(length) + rest, 8), kInvalid, "SAFETENSORS_HEADER_LENGTH", "chunk",
                     {"2 to 92", absl::StrCat("got a length of ", length)});
  }
  UploadReader reader(OptionsOf(SeededNorm(1)), kMaxUploadBytes);
  EXPECT_TRUE(UploadReader(OptionsOf(SeededNorm(1)), kMaxUploadBytes).Take(AsBytes(Length(100'000'000))).ok());
  ExpectStoreError(reader.Take(AsBytes(Length(100'000'001))), kInvalid, "SAFETENSORS_HEADER_LENGTH", "chunk",
                   {"100000000"});
}

struct BadHeader {
  Layer options;
  std::string json;
  size_t data_bytes;
  std::string reason;
  std::string field;
  std::string part;
};

TEST(UploadReader, RefusesAHeaderWithItsLastByte) {
  const auto entry = [](const std::string& name, const std::string& dtype, const std::string& shape, int begin,
                        int end) {
    return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":[", begin,
                        ",", end, "]}");
  };
  const std::string gamma = entry("gamma", "F32", "[2]", 0, 8);
  const Layer norm = SeededNorm(1);
  NormalizeLayer grouped = std::get<NormalizeLayer>(norm);
  grouped.spec.group_size = 4;
  FeedForwardLayer plain;
  plain.spec.form = FeedForwardForm::kPlain;
  FeedForwardLayer quantized = plain;
  quantized.quantization = {.source_hash = std::string(64, 'a'), .matrices = {{"up", 0, 0}}};
  const std::vector<BadHeader> bad = {
      {norm, "{}", 0, "MISSING", "weights.gamma", "a norm"},
      {norm, "[]", 0, "SAFETENSORS_HEADER_JSON", "chunk", "the upload: the header"},
      {norm, "{\"gamma\":1}", 8, "SAFETENSORS_HEADER_FORM", "chunk", "the upload: \"gamma\""},
      {norm, "{" + gamma + "}", 7, "SAFETENSORS_TRUNCATED", "chunk", "the upload: tensor \"gamma\""},
      {norm, "{" + gamma + "}", 9, "SAFETENSORS_OFFSETS", "chunk", "got 9"},
      {norm, "{" + gamma + "," + gamma + "}", 8, "SAFETENSORS_DUPLICATE_KEY", "chunk", "twice"},
      {norm, "{" + entry("gamma", "ZZ", "[2]", 0, 8) + "}", 8, "SAFETENSORS_DTYPE", "chunk", "\"ZZ\""},
      {norm, "{" + entry("gamma", "F64", "[1]", 0, 8) + "}", 8, "DTYPE", "weights.gamma.dtype", "got F64"},
      {norm, "{" + entry("gamma", "U8", "[8]", 0, 8) + "}", 8, "DTYPE", "weights.gamma.dtype", "F32, F16, BF16 or I8"},
      {norm, "{" + entry("gamma", "I8", "[8]", 0, 8) + "}", 8, "DTYPE_MISMATCH", "weights.gamma.dtype", "got int8"},
      {plain, absl::StrCat("{", entry("up", "I8", "[4,2]", 0, 8), ",", entry("down", "F32", "[1,4]", 8, 24), "}"), 24,
       "MISSING", "weights.up_scale", "expected scales, float16 [4, 1], since weights.up is int8"},
      {plain,
       absl::StrCat("{", entry("up", "I8", "[4,2]", 0, 8), ",", entry("up_scale", "F32", "[4,1]", 8, 24), ",",
                    entry("down", "F32", "[1,4]", 24, 40), "}"),
       40, "DTYPE_MISMATCH", "weights.up_scale.dtype", "expected float16, got float32"},
      {plain,
       absl::StrCat("{", entry("up", "I8", "[4,2]", 0, 8), ",", entry("up_scale", "F16", "[4]", 8, 16), ",",
                    entry("down", "F32", "[1,4]", 16, 32), "}"),
       32, "SHAPE_MISMATCH", "weights.up_scale.shape", "expected [4, 1], one for each 32 inputs"},
      {plain,
       absl::StrCat("{", entry("up", "F16", "[4,1]", 0, 8), ",", entry("up_scale", "F16", "[4,1]", 8, 16), ",",
                    entry("down", "F32", "[1,4]", 16, 32), "}"),
       32, "UNEXPECTED_FIELD", "weights.up_scale", "since weights.up is float16"},
      {quantized, "{" + entry("up", "F32", "[4,1]", 0, 16) + "," + entry("down", "F32", "[1,4]", 16, 32) + "}", 32,
       "QUANTIZATION", "header.quantization", "since the layer has no int8 matrix"},
      {norm, "{" + entry("weight", "F32", "[2]", 0, 8) + "}", 8, "UNKNOWN_WEIGHT", "weights.weight", "gamma, beta"},
      {norm, "{" + entry("../gamma", "F32", "[2]", 0, 8) + "}", 8, "UNKNOWN_WEIGHT", "weights.../gamma", "gamma, beta"},
      {norm, "{" + entry(std::string(20'000, 'w'), "F32", "[2]", 0, 8) + "}", 8, "UNKNOWN_WEIGHT",
       "weights." + Shortened(std::string(20'000, 'w')), "gamma, beta"},
      {norm, "{" + entry("evil\\n\\u001b", "F32", "[2]", 0, 8) + "}", 8, "UNKNOWN_WEIGHT", "weights.evil\\n\\033",
       "gamma, beta"},
      {norm, "{" + entry("gamma", "F32", "[2,1]", 0, 8) + "}", 8, "SHAPE_MISMATCH", "weights.gamma.shape", "[2, 1]"},
      {norm, "{" + entry("gamma", "F32", "[]", 0, 4) + "}", 4, "SHAPE_MISMATCH", "weights.gamma.shape", "[]"},
      {norm, "{" + entry("gamma", "F32", "[0]", 0, 0) + "}", 0, "SHAPE_MISMATCH", "weights.gamma.shape", "[0]"},
      {norm, "{" + entry("gamma", "F32", "[1,1,1,1,1,1,1,1,2]", 0, 8) + "}", 8, "", "weights.gamma.shape", "8"},
      {norm, "{" + entry("gamma", "F32", "[0,4611686018427387904]", 0, 0) + "}", 0, "", "weights.gamma.shape", ""},
      {norm, "{" + gamma + "," + entry("beta", "F32", "[1]", 8, 12) + "}", 12, "SHAPE_MISMATCH", "weights.beta.shape",
       ""},
      {grouped, "{" + gamma + "}", 8, "OUT_OF_RANGE", "header.normalize.group_size", "divisor of 2"},
      {SeededSwiGlu(1), "{" + gamma + "}", 8, "UNKNOWN_WEIGHT", "weights.gamma", "gate, gate_scale, up, up_scale"},
      {plain, "{" + entry("gate", "F32", "[1,2]", 0, 8) + "}", 8, "UNEXPECTED_FIELD", "weights.gate", "PLAIN"},
      {plain, "{" + entry("up", "F32", "[1,2]", 0, 8) + "}", 8, "MISSING", "weights.down", ""},
      {plain,
       absl::StrCat("{", entry("up", "F32", "[1,2]", 0, 8), ",", entry("down", "F32", "[2,1]", 8, 16), ",",
                    entry("inner_norm_gamma", "F32", "[1]", 16, 20), "}"),
       20, "UNEXPECTED_FIELD", "weights.inner_norm_gamma", "header.feed_forward.inner_norm is not set"},
  };
  for (const BadHeader& one : bad) {
    const std::string bytes = Length(one.json.size()) + one.json + std::string(one.data_bytes, '\0');
    const auto status = ErrorAt(one.options, bytes, 8 + one.json.size());
    ExpectStoreError(status, kInvalid, one.reason.empty() ? DetailsOf(status).reason : one.reason, one.field,
                     {one.part});
  }
}

TEST(UploadReader, CountsTheBytes) {
  const Layer layer = SeededNorm(1);
  const std::string bytes = SafetensorsOf(layer);
  const auto size = static_cast<int64_t>(bytes.size());
  UploadReader more(OptionsOf(layer), size);
  ASSERT_TRUE(more.Take(AsBytes(bytes)).ok());
  ASSERT_TRUE(more.Take({}).ok());
  ExpectStoreError(more.Take(AsBytes("x")), kInvalid, "TOO_MANY_BYTES", "chunk", {absl::StrCat(size)});
  ExpectStoreError(UploadReader(OptionsOf(layer), size).Take(AsBytes(bytes + "x")), kInvalid, "TOO_MANY_BYTES",
                   "chunk");
  for (const size_t count : {size_t{0}, size_t{4}, size_t{20}, bytes.size() - 1}) {
    UploadReader fewer(OptionsOf(layer), size);
    ASSERT_TRUE(fewer.Take(AsBytes(bytes.substr(0, count))).ok());
    ExpectStoreError(fewer.Finish().status(), kInvalid, "BYTE_COUNT_MISMATCH", "chunk",
                     {absl::StrCat("expected ", size), absl::StrCat("got ", count)});
  }
}

TEST(CheckOptions, TakesEveryLayerThereCanBe) {
  EXPECT_TRUE(CheckOptions(SeededNorm(1)).ok());
  EXPECT_TRUE(CheckOptions(SeededSwiGlu(1)).ok());
  EXPECT_TRUE(CheckOptions(FeedForwardLayer{ReluSpec(), {}}).ok());
  NormalizeLayer norm;
  norm.spec = {NormKind::kLayerNorm, 0.0, NormRounding::kAfterGamma, 1.0, kMaxDimension, GatePosition::kFirst};
  EXPECT_TRUE(CheckOptions(norm).ok());
}

TEST(CheckOptions, NamesTheFieldOfTheHeader) {
  const auto norm = [](auto change) {
    NormalizeLayer layer;
    layer.spec.rounding = NormRounding::kBeforeGamma;
    change(layer.spec);
    return CheckOptions(layer);
  };
  const std::string field = "header.normalize.";
  ExpectStoreError(norm([](auto& s) { s.rounding = NormRounding::kUnspecified; }), kInvalid, "MISSING",
                   field + "rounding");
  ExpectStoreError(norm([](auto& s) { s.epsilon = -1; }), kInvalid, "EPSILON_OUT_OF_RANGE", field + "epsilon");
  ExpectStoreError(norm([](auto& s) { s.gamma_offset = std::numeric_limits<double>::quiet_NaN(); }), kInvalid,
                   "OUT_OF_RANGE", field + "gamma_offset");
  ExpectStoreError(norm([](auto& s) { s.group_size = -1; }), kInvalid, "OUT_OF_RANGE", field + "group_size");
  ExpectStoreError(norm([](auto& s) { s.group_size = kMaxDimension + 1; }), kInvalid, "OUT_OF_RANGE",
                   field + "group_size");
  ExpectStoreError(norm([](auto& s) { s.normalized_axes = 2; }), kInvalid, "OUT_OF_RANGE", field + "normalized_axes");
  const auto feed_forward = [](auto change) {
    FeedForwardLayer layer{ReluSpec(), {}};
    change(layer.spec);
    return CheckOptions(layer);
  };
  const std::string feed_forward_field = "header.feed_forward.";
  ExpectStoreError(feed_forward([](auto& s) { s.gate_max = 1; }), kInvalid, "UNEXPECTED_FIELD",
                   feed_forward_field + "gate_max");
  ExpectStoreError(feed_forward([](auto& s) { s.activation.beta = 2; }), kInvalid, "UNEXPECTED_FIELD",
                   feed_forward_field + "swish_beta");
  ExpectStoreError(feed_forward([](auto& s) { s.inner_norm = InnerNorm{-1.0}; }), kInvalid, "EPSILON_OUT_OF_RANGE",
                   feed_forward_field + "inner_norm.epsilon");
  FeedForwardLayer quantized{.spec = ReluSpec()};
  quantized.quantization = {.source_hash = std::string(64, 'a'), .matrices = {{"up", 0, 0}}};
  EXPECT_TRUE(CheckOptions(quantized).ok()) << "whether there is such a matrix, only the weights tell";
  quantized.quantization->source_hash = "x";
  ExpectStoreError(CheckOptions(quantized), kInvalid, "QUANTIZATION", "header.quantization.source_hash");
}

}  // namespace
}  // namespace layerd
