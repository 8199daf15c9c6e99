// The files of a checkpoint: folders and single files, shards and their index, damage, links, change.
#include "tests/lib/weights/checkpoint_files.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/weights/checkpoint_folder.h"
#include "lib/weights/tensor_files.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr char kLlamaConfig[] = R"({"model_type":"llama"})";
constexpr char kIndexName[] = "model.safetensors.index.json";

Shapes Norm(const std::string& path) { return {{path + ".weight", {4}}}; }

// {"metadata": …, "weight_map": …}.
std::string Index(const std::vector<std::pair<std::string, std::string>>& map) {
  std::string json = R"({"metadata":{"total_size":7,"x":[{"weight_map":1}]},"weight_map":{)";
  for (const auto& [tensor, file] : map) {
    absl::StrAppend(&json, json.back() == '{' ? "" : ",", "\"", tensor, "\":\"", file, "\"");
  }
  return json + "}}";
}

// Llama's norms "layers.{0,1,2}.input_layernorm" in shards 1, 2, 3, and an index.
class Sharded : public ::testing::Test {
 protected:
  Sharded() {
    folder_.Write("config.json", kLlamaConfig);
    std::vector<std::pair<std::string, std::string>> map;
    for (int i = 0; i < 3; ++i) {
      WriteTensors(folder_.File(Shard(i)), Norm(Layer(i)));
      map.emplace_back(Layer(i) + ".weight", Shard(i));
    }
    folder_.Write(kIndexName, Index(map));
  }

  static std::string Layer(int i) { return absl::StrCat("layers.", i, ".input_layernorm"); }
  static std::string Shard(int i) { return absl::StrCat("model-0000", i + 1, "-of-00003.safetensors"); }

  absl::StatusOr<Checkpoint> Open() const { return Checkpoint::Open(folder_.path(), "m"); }
  // Only the layer of shard 1 is spoiled, and says so in these words.
  void ExpectOnlyTheSecondSpoiled(std::initializer_list<std::string> parts) const {
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->layers().size(), 3);
    EXPECT_TRUE(StatusOf(checkpoint, Layer(0)).ok());
    EXPECT_TRUE(StatusOf(checkpoint, Layer(2)).ok());
    const absl::Status status = StatusOf(checkpoint, Layer(1));
    ExpectUnusable(status, "LAYER_DAMAGED", {"tensor \"layers.1.input_layernorm.weight\"", Shard(1)});
    ExpectUnusable(status, "LAYER_DAMAGED", parts);
    // Callers from outside need not know where the files lie.
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(folder_.path())));
  }

  TemporaryFolder folder_;
};

TEST_F(Sharded, ReadsEachTensorFromItsFile) {
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "llama");
  for (int i = 0; i < 3; ++i) {
    const auto layer = (*checkpoint->Find(Layer(i)))->Read();
    EXPECT_TRUE(SameBits(WeightOf(layer, "gamma"), TensorNamed(Layer(i) + ".weight", {4})));
  }
}

TEST_F(Sharded, ALayerMayLieInSeveralFiles) {
  const Shapes ffn = GateUpDown("layers.0.mlp");
  std::vector<std::pair<std::string, std::string>> map;
  for (const auto& [name, shape] : ffn) {
    WriteTensors(folder_.File(name + ".safetensors"), {{name, shape}});
    map.emplace_back(name, name + ".safetensors");
  }
  folder_.Write(kIndexName, Index(map));
  const auto layer = (*Open()->Find("layers.0.mlp"))->Read();
  for (const char* role : {"gate", "up", "down"}) {
    const std::string name = absl::StrCat("layers.0.mlp.", role, "_proj.weight");
    EXPECT_TRUE(SameBits(WeightOf(layer, role), TensorNamed(name, ffn.at(name))));
  }
}

TEST_F(Sharded, MissingFileSpoilsOnlyItsLayers) {
  fs::remove(folder_.File(Shard(1)));
  ExpectOnlyTheSecondSpoiled({"cannot be opened", "No such file"});
}

TEST_F(Sharded, DamagedFileSpoilsOnlyItsLayers) {
  for (const std::string& bytes :
       {std::string(), std::string("short"), SafetensorsBytes("{", 16),
        SafetensorsBytes(R"({"layers.1.input_layernorm.weight":{"dtype":"ZZ","shape":[4],"data_offsets":[0,16]}})", 16),
        SafetensorsBytes(R"({},"__metadata__":{})", 0), SafetensorsBytes(R"({"__metadata__":7})", 0),
        SafetensorsBytes(R"({"layers.1.input_layernorm.weight":{"dtype":"F32","shape":[9223372036854775807,)"
                         R"(9223372036854775807],"data_offsets":[0,16]}})",
                         16)}) {
    folder_.Write(Shard(1), bytes);
    ExpectOnlyTheSecondSpoiled({});
  }
}

TEST_F(Sharded, FileWithoutTheTensorSpoilsOnlyThatTensor) {
  folder_.Write(Shard(1), SafetensorsBytes("{}", 0));
  ExpectOnlyTheSecondSpoiled({"the index names that file for it, which does not have it"});
  // Another file's tensor of that name is not taken in its place.
  WriteTensors(folder_.File(Shard(0)), Norm(Layer(0)) + Norm(Layer(1)));
  ExpectOnlyTheSecondSpoiled({"does not have it"});
}

TEST_F(Sharded, ImpossibleShapeSpoilsOnlyThatTensor) {
  WriteTensors(folder_.File(Shard(1)), {{Layer(1) + ".weight", {4, 1}}});
  const auto checkpoint = Open();
  ExpectUnusable(StatusOf(checkpoint, Layer(1)), "LAYER_DAMAGED",
                 {"tensor \"layers.1.input_layernorm.weight\"", "expected [d]", "got [4, 1]"});
  EXPECT_TRUE(StatusOf(checkpoint, Layer(0)).ok());
  folder_.Write(Shard(1), SafetensorsBytes(R"({"layers.1.input_layernorm.weight":{"dtype":"F32",)"
                                           R"("shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,16]}})",
                                           16));
  ExpectOnlyTheSecondSpoiled({"shape"});
}

TEST_F(Sharded, UnusableDtypeSpoilsOnlyThatLayer) {
  for (const char* dtype : {"I16", "F8_E4M3", "U8"}) {
    folder_.Write(Shard(1),
                  SafetensorsBytes(absl::StrCat(R"({"layers.1.input_layernorm.weight":{"dtype":")", dtype,
                                                R"(","shape":[4],"data_offsets":[0,)", *dtype == 'I' ? 8 : 4, "]}}"),
                                   *dtype == 'I' ? 8 : 4));
    const auto checkpoint = Open();
    ExpectUnusable(StatusOf(checkpoint, Layer(1)), "LAYER_DTYPE",
                   {"layers.1.input_layernorm.weight", Shard(1), "F32, F16, BF16 and I8", dtype});
    EXPECT_TRUE(StatusOf(checkpoint, Layer(0)).ok());
  }
  // Int8 is for matrices.
  folder_.Write(Shard(1), SafetensorsBytes(R"({"layers.1.input_layernorm.weight":{"dtype":"I8","shape":[4],)"
                                           R"("data_offsets":[0,4]}})",
                                           4));
  ExpectUnusable(StatusOf(Open(), Layer(1)), "LAYER_DTYPE",
                 {"tensor \"layers.1.input_layernorm.weight\"", "float16 or bfloat16, got int8"});
}

TEST_F(Sharded, LinksOutOfTheFolderAreRefused) {
  const TemporaryFolder outside;
  WriteTensors(outside.File("secret.safetensors"), Norm(Layer(1)));
  for (const std::string& target : {outside.File("secret.safetensors"),
                                    "../" + fs::path(outside.path()).filename().string() + "/secret.safetensors"}) {
    fs::remove(folder_.File(Shard(1)));
    fs::create_symlink(target, folder_.File(Shard(1)));
    ASSERT_TRUE(fs::exists(folder_.File(Shard(1))));
    ExpectOnlyTheSecondSpoiled({"link out of it"});
  }
  // Within the folder a link is fine, however it is written, and the folder's own path may have links.
  fs::rename(folder_.File(Shard(0)), folder_.File("blob"));
  fs::create_symlink("blob", folder_.File(Shard(0)));
  fs::rename(folder_.File(Shard(2)), folder_.File("blob2"));
  fs::create_symlink(fs::canonical(folder_.File("blob2")), folder_.File(Shard(2)));
  ExpectOnlyTheSecondSpoiled({"link out of it"});
  fs::create_directory_symlink(folder_.path(), outside.File("model"));
  const auto checkpoint = Checkpoint::Open(outside.File("model"), "m");
  EXPECT_TRUE(StatusOf(checkpoint, Layer(0)).ok());
  EXPECT_TRUE(StatusOf(checkpoint, Layer(2)).ok());
  ExpectUnusable(StatusOf(checkpoint, Layer(1)), "LAYER_DAMAGED", {"link out of it"});
  // A folder whose name only begins like this one's is another folder.
  const std::string sibling = folder_.path() + "-2";
  fs::create_directory(sibling);
  WriteTensors(sibling + "/secret.safetensors", Norm(Layer(1)));
  fs::remove(folder_.File(Shard(1)));
  fs::create_symlink(sibling + "/secret.safetensors", folder_.File(Shard(1)));
  ExpectOnlyTheSecondSpoiled({"link out of it"});
  fs::remove_all(sibling);
}

TEST_F(Sharded, WhatIsNoRegularFileIsRefusedWithoutWaiting) {
  fs::remove(folder_.File(Shard(1)));
  ASSERT_EQ(mkfifo(folder_.File(Shard(1)).c_str(), 0600), 0);
  ExpectOnlyTheSecondSpoiled({"regular file"});
  fs::remove(folder_.File(Shard(1)));
  fs::create_directory(folder_.File(Shard(1)));
  ExpectOnlyTheSecondSpoiled({"regular file"});
}

TEST_F(Sharded, HostileFileNamesInTheIndexAreRefused) {
  const std::string tensor = Layer(0) + ".weight";
  for (const char* name : {"../x.safetensors", "..", ".", "", "/etc/x.safetensors", "a/b.safetensors", ".safetensors",
                           ".hidden.safetensors", "x\\u0000.safetensors", "a\\\\b.safetensors", "x", "config.json",
                           "..\\u002f..\\u002fx.safetensors"}) {
    folder_.Write(kIndexName, Index({{tensor, name}}));
    ExpectError(Open().status(), kInvalid, "CHECKPOINT_INDEX", {kIndexName, tensor, "in the same folder"});
  }
  // A name is a name: nothing is decoded.
  folder_.Write(kIndexName, Index({{tensor, "%2e%2e%2fx.safetensors"}}));
  ExpectUnusable(StatusOf(Open(), Layer(0)), "LAYER_DAMAGED", {"%2e%2e%2fx.safetensors", "No such file"});
}

TEST_F(Sharded, DamagedIndexIsRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not JSON"},
      {"{", "not JSON"},
      {"[]", "expected an object, got a list"},
      {"7", "expected an object, got a number"},
      {"\"weight_map\"", "expected an object, got a string"},
      {"{}", "no weight_map"},
      {R"({"weight_map":[]})", "weight_map: expected an object, got a list"},
      {R"({"weight_map":"x"})", "weight_map: expected an object, got a string"},
      {R"({"weight_map":null})", "weight_map: expected an object, got null"},
      {R"({"weight_map":{"t":7}})", "tensor \"t\": expected the name of a file, got a number"},
      {R"({"weight_map":{"t":{}}})", "tensor \"t\": expected the name of a file, got an object"},
      {R"({"weight_map":{"t":["a.safetensors"]}})", "tensor \"t\": expected the name of a file, got a list"},
      {R"({"weight_map":{"t":true}})", "tensor \"t\": expected the name of a file, got true"},
      {R"({"weight_map":{},"weight_map":{}})", "\"weight_map\" stands there twice"},
      {R"({"weight_map":{"t":"a.safetensors","t":"a.safetensors"}})", "tensor \"t\" twice"},
      {R"({"weight_map":{}}x)", "not JSON"},
      {std::string("{\"weight_map\":{}}\0", 18), "not JSON"},
      {std::string((32 << 20) + 1, ' '), "too long"},
  };
  for (const auto& [json, text] : cases) {
    folder_.Write(kIndexName, json);
    ExpectError(Open().status(), kInvalid, "CHECKPOINT_INDEX", {kIndexName, text});
  }
  std::vector<std::pair<std::string, std::string>> map;
  for (int i = 0; i <= 4096; ++i) map.emplace_back(absl::StrCat("t", i), absl::StrCat(i, ".safetensors"));
  folder_.Write(kIndexName, Index(map));
  ExpectError(Open().status(), kInvalid, "CHECKPOINT_INDEX", {"at most 4096 files"});
  // Deep nesting beside weight_map is not looked at, and costs nothing.
  std::string deep = "{\"metadata\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  deep += std::string(100000, ']') + ",\"weight_map\":{}}";
  folder_.Write(kIndexName, deep);
  EXPECT_TRUE(Open().ok()) << Open().status();
}

TEST_F(Sharded, TooManyTensorsAreRefused) {
  const auto folder = CheckpointFolder::Open(folder_.path());
  const auto open = [&](size_t max_tensors) { return OpenTensorFiles(*folder, max_tensors).status(); };
  const auto expect_three = [&] {
    EXPECT_TRUE(open(3).ok()) << open(3);
    ExpectError(open(2), kInvalid, "CHECKPOINT_TENSORS", {"at most 2", "got 3"});
  };
  expect_three();
  fs::remove(folder_.File(kIndexName));  // now by all files together
  expect_three();
  WriteTensors(folder_.File("model.safetensors"), Norm("a") + Norm("b") + Norm("c"));
  expect_three();
}

TEST_F(Sharded, IndexMayNotLeadOut) {
  const TemporaryFolder outside;
  fs::rename(folder_.File(kIndexName), outside.File("index"));
  fs::create_symlink(outside.File("index"), folder_.File(kIndexName));
  ExpectError(Open().status(), kInvalid, "CHECKPOINT_OUTSIDE", {kIndexName});
}

// Without a family, a damaged file leaves open what its tensors are; what is called a norm is listed.
TEST_F(Sharded, DamageIsSeenWithoutAFamilyToo) {
  fs::remove(folder_.File("config.json"));
  folder_.Write(Shard(1), "");
  folder_.Write(kIndexName,
                Index({{"q_proj.weight", Shard(1)}, {"ln_1.weight", Shard(1)}, {"m.Norm.weight", Shard(1)}}));
  const auto described = Described(Checkpoint::Open(
      folder_.path(), "m",
      {.norm_kind = NormKind::kRmsNorm, .norm_epsilon = 1, .norm_rounding = NormRounding::kAfterGamma}));
  ASSERT_EQ(described.size(), 2);
  EXPECT_THAT(described.at("ln_1"), HasSubstr("too short"));
  EXPECT_THAT(described.at("m.Norm"), HasSubstr("too short"));
}

TEST_F(Sharded, FilesOfTheFolderThatWasOpenedAreRead) {
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  // Another version takes the folder's name; the layers stay what they were.
  fs::rename(folder_.path(), folder_.path() + "-old");
  fs::create_directory(folder_.path());
  WriteTensors(folder_.File(Shard(0)), {{Layer(0) + ".weight", {8}}});
  const auto layer = (*checkpoint->Find(Layer(0)))->Read();
  EXPECT_TRUE(SameBits(WeightOf(layer, "gamma"), TensorNamed(Layer(0) + ".weight", {4})));
  fs::remove_all(folder_.path() + "-old");
  EXPECT_TRUE((*checkpoint->Find(Layer(2)))->Read().ok());
}

TEST(CheckpointFiles, WithoutProcThePathTellsWhereAFileLies) {
  const TemporaryFolder folder, outside;
  folder.Write("in", "");
  outside.Write("out", "");
  fs::create_symlink("in", folder.File("inner_link"));
  fs::create_symlink(outside.File("out"), folder.File("outer_link"));
  fs::create_directory_symlink(folder.path(), outside.File("folder"));
  const auto lies_in = [](const std::string& where, const std::string& name) {
    const auto file = InputFile::Open(where + "/" + name);
    EXPECT_TRUE(file.ok()) << file.status();
    return LiesInByPath(file->descriptor(), name, where);
  };
  for (const std::string& where : {folder.path(), outside.File("folder")}) {
    EXPECT_TRUE(lies_in(where, "in"));
    EXPECT_TRUE(lies_in(where, "inner_link"));
    EXPECT_FALSE(lies_in(where, "outer_link"));
  }
  // What has the name now is not what was opened.
  const auto file = InputFile::Open(outside.File("out"));
  EXPECT_FALSE(LiesInByPath(file->descriptor(), "in", folder.path()));
  EXPECT_FALSE(LiesInByPath(file->descriptor(), "gone", folder.path()));
}

TEST(CheckpointFiles, WhichFilesAFolderIsReadFrom) {
  const TemporaryFolder folder;
  const auto layers = [&] {
    std::vector<std::string> names;
    for (const auto& [name, text] : Described(Checkpoint::Open(folder.path(), "m"))) names.push_back(name);
    return names;
  };
  ExpectError(Checkpoint::Open(folder.path(), "m").status(), kNotFound, "FILE_NOT_FOUND", {folder.path()});
  WriteTensors(folder.File("stories.f32.safetensors"), Norm("only"));
  WriteTensors(folder.File(".hidden.safetensors"), Norm("hidden"));
  WriteTensors(folder.File("other.bin"), Norm("bin"));
  EXPECT_THAT(layers(), ElementsAre("only"));
  WriteTensors(folder.File("second.safetensors"), Norm("second"));
  EXPECT_THAT(layers(), ElementsAre("only", "second"));
  // An index goes over plain files, and model.safetensors over both, as in Transformers.
  folder.Write(kIndexName, Index({{"second.weight", "second.safetensors"}}));
  EXPECT_THAT(layers(), ElementsAre("second"));
  WriteTensors(folder.File("model.safetensors"), Norm("single"));
  EXPECT_THAT(layers(), ElementsAre("single"));
}

TEST(CheckpointFiles, SeveralFilesWithoutAnIndex) {
  const TemporaryFolder folder;
  WriteTensors(folder.File("a.safetensors"), Norm("x") + Norm("a"));
  WriteTensors(folder.File("b.safetensors"), Norm("x"));
  ExpectError(Checkpoint::Open(folder.path(), "m").status(), kInvalid, "CHECKPOINT_AMBIGUOUS",
              {"x.weight", "a.safetensors", "b.safetensors"});
  // Nothing tells which layers a damaged one would have had.
  folder.Write("b.safetensors", "damaged");
  ExpectError(Checkpoint::Open(folder.path(), "m").status(), kInvalid, "SAFETENSORS_TRUNCATED", {"b.safetensors"});
}

TEST(CheckpointFiles, DamagedOnlyFileIsRefused) {
  const TemporaryFolder folder;
  for (const char* name : {"model.safetensors", "other.safetensors"}) {
    folder.Write(name,
                 SafetensorsBytes(R"({"t":{"dtype":"ZZ","shape":[2],"data_offsets":[9223372036854775808,16]}})", 16));
    ExpectError(Checkpoint::Open(folder.path(), "m").status(), kInvalid, "SAFETENSORS_DTYPE", {name, "ZZ"});
    ExpectError(Checkpoint::Open(folder.File(name), "m").status(), kInvalid, "SAFETENSORS_DTYPE", {name, "ZZ"});
    fs::remove(folder.File(name));
  }
  folder.Write("model.safetensors", SafetensorsBytes("{}", 0));
  const auto empty = Checkpoint::Open(folder.path(), "m");
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE(empty->layers().empty());
}

TEST(CheckpointFiles, DamagedConfigIsRefused) {
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":[";
  for (const std::string& config :
       {std::string("{"), std::string("[]"), std::string("1"), std::string("{}\0x", 4), std::string("{}{}"),
        std::string(" "), std::string("{\"a\":1,\"a\":2}"), std::string("{\"a\":NaN}"), std::string("{'a':1}"), deep}) {
    const Model model(Norm("model.norm"), config);
    ExpectError(model.Open().status(), kInvalid, "CHECKPOINT_CONFIG", {"config.json"});
  }
  ExpectError(Model(Norm("n"), std::string((4 << 20) + 1, ' ')).Open().status(), kInvalid, "CHECKPOINT_CONFIG",
              {"too long"});
}

TEST(CheckpointFiles, ConfigAndDescriptionMayNotLeadOut) {
  for (const char* name : {"config.json", "layerd.json", "model.safetensors"}) {
    const TemporaryFolder outside;
    const Model model(Norm("model.norm"), kLlamaConfig, R"({"layers":[]})");
    fs::rename(model.folder().File(name), outside.File(name));
    fs::create_symlink(outside.File(name), model.folder().File(name));
    ExpectError(model.Open().status(), kInvalid, "CHECKPOINT_OUTSIDE", {name, "link out of it"});
  }
}

TEST(CheckpointFiles, MissingThings) {
  const TemporaryFolder folder;
  ExpectError(Checkpoint::Open(folder.File("no"), "m").status(), kNotFound, "FILE_NOT_FOUND", {"no"});
  ExpectError(Checkpoint::Open(folder.File("no/x.safetensors"), "m").status(), kNotFound, "FILE_NOT_FOUND", {"no"});
  ExpectError(Checkpoint::Open(folder.File(std::string("a\0b", 3)), "m").status(), kNotFound, "FILE_NOT_FOUND", {});
}

TEST(CheckpointFiles, AFileAloneHasItsFoldersConfig) {
  const Model model(Norm("model.norm"), kLlamaConfig);
  WriteTensors(model.folder().File("other.safetensors"), Norm("layers.0.input_layernorm"), DType::kBFloat16);
  const auto checkpoint = Checkpoint::Open(model.folder().File("other.safetensors"), "local");
  EXPECT_EQ(Described(checkpoint), (std::map<std::string, std::string>{
                                       {"layers.0.input_layernorm", "rms_norm; eps 1e-06; before_gamma; d 4; BF16"}}));
  EXPECT_EQ(checkpoint->layers()[0]->info().name, "models/local/layers/layers.0.input_layernorm");
  // Here the caller names the file, so it may be a link.
  const TemporaryFolder elsewhere;
  fs::create_symlink(model.folder().File("other.safetensors"), elsewhere.File("link.safetensors"));
  const auto linked = Checkpoint::Open(elsewhere.File("link.safetensors"), "local");
  ASSERT_TRUE(linked.ok()) << linked.status();
  EXPECT_EQ(linked->family(), "tensor names");
}

TEST(CheckpointFiles, OutlineHasDtypesAndShapesButNoData) {
  const Model model(GateUpDown("layers.0.mlp"), kLlamaConfig);
  const auto checkpoint = model.Open();
  const LayerInfo& info = (*checkpoint->Find("layers.0.mlp"))->info();
  EXPECT_EQ(WeightsOf(info.outline).size(), 3);
  for (const auto& [role, tensor] : WeightsOf(info.outline)) EXPECT_EQ(tensor.data(), nullptr) << role;
  EXPECT_EQ(info.extent.dim, 4);
  EXPECT_EQ(info.extent.hidden_dim, 6);
  EXPECT_EQ(info.extent.out_dim, 4);
  EXPECT_EQ(info.extent.parameters, 72);
  EXPECT_EQ(info.extent.weight_bytes, 288);
  EXPECT_TRUE(info.content_hash.empty());
}

void SetTime(const std::string& path, int seconds) {
  fs::last_write_time(path, fs::file_time_type(std::chrono::seconds(seconds)));
}

TEST(CheckpointChange, AFileWrittenUnderWayIsAnError) {
  const Model model(Norm("model.norm") + Norm("layers.0.input_layernorm"), kLlamaConfig);
  const std::string path = model.folder().File("model.safetensors");
  SetTime(path, 1);
  const auto checkpoint = model.Open();
  const auto norm = *checkpoint->Find("model.norm");
  ASSERT_TRUE(norm->Read().ok());
  const std::string bytes = ReadWhole(path);
  {  // in place: other values, the same size
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x7f');
  }
  SetTime(path, 2);
  ExpectUnusable(norm->Read().status(), "LAYER_DAMAGED", {"model.safetensors", "changed"});
  EXPECT_TRUE(norm->info().status.ok());
  fs::resize_file(path, bytes.size() - 1);
  ExpectUnusable(norm->Read().status(), "LAYER_DAMAGED", {"model.safetensors"});
  fs::resize_file(path, 0);
  ExpectUnusable(norm->Read().status(), "LAYER_DAMAGED", {"model.safetensors", "became shorter"});
  SetTime(path, 1);
  ExpectUnusable(norm->Read().status(), "LAYER_DAMAGED", {"model.safetensors"});
}

TEST(CheckpointChange, AFileReplacedOrRemovedStaysWhatItWas) {
  const Model model(Norm("model.norm"), kLlamaConfig);
  const auto checkpoint = model.Open();
  const auto norm = *checkpoint->Find("model.norm");
  WriteTensors(model.folder().File("model.safetensors"), {{"model.norm.weight", {8}}});  // by a new file of that name
  EXPECT_TRUE(SameBits(WeightOf(norm->Read(), "gamma"), TensorNamed("model.norm.weight", {4})));
  fs::remove_all(model.folder().path());
  EXPECT_TRUE(SameBits(WeightOf(norm->Read(), "gamma"), TensorNamed("model.norm.weight", {4})));
}

TEST(CheckpointFingerprint, TellsEveryChange) {
  const Model model(Norm("model.norm"), kLlamaConfig, R"({"layers":[]})");
  const TemporaryFolder& folder = model.folder();
  const auto fingerprint = [&] {
    const auto text = CheckpointFingerprint(folder.path());
    EXPECT_TRUE(text.ok()) << text.status();
    return text.value_or("");
  };
  std::string last = fingerprint();
  EXPECT_FALSE(last.empty());
  EXPECT_EQ(fingerprint(), last);
  const auto changed = [&] { return std::exchange(last, fingerprint()) != last; };
  for (const char* name : {"config.json", "layerd.json", "model.safetensors"}) {
    SetTime(folder.File(name), 1);
    EXPECT_TRUE(changed()) << name;
    // Another file of the same name, size and time.
    fs::copy_file(folder.File(name), folder.File("copy"));
    SetTime(folder.File("copy"), 1);
    fs::rename(folder.File("copy"), folder.File(name));
    EXPECT_TRUE(changed()) << name;
    fs::resize_file(folder.File(name), fs::file_size(folder.File(name)) + 1);
    SetTime(folder.File(name), 1);
    EXPECT_TRUE(changed()) << name;
  }
  folder.Write(kIndexName, "");
  EXPECT_TRUE(changed());
  folder.Write("b.safetensors", "");
  EXPECT_TRUE(changed());
  fs::rename(folder.File("b.safetensors"), folder.File("c.safetensors"));
  EXPECT_TRUE(changed());
  fs::remove(folder.File("config.json"));
  EXPECT_TRUE(changed());
  // What is no part of the checkpoint is nothing to it.
  folder.Write("README.md", "text");
  folder.Write(".x.safetensors", "");
  EXPECT_FALSE(changed());
  // A link is judged by what it leads to, and one that leads nowhere is still a file.
  fs::create_symlink("README.md", folder.File("d.safetensors"));
  EXPECT_TRUE(changed());
  folder.Write("README.md", "longer text");
  EXPECT_TRUE(changed());
  fs::remove(folder.File("README.md"));
  EXPECT_TRUE(changed());
}

TEST(CheckpointFingerprint, IsEmptyWhereThereIsNoCheckpoint) {
  const TemporaryFolder folder;
  folder.Write("config.json", "{}");
  EXPECT_EQ(*CheckpointFingerprint(folder.path()), "");
  folder.Write(kIndexName, "{}");
  EXPECT_NE(*CheckpointFingerprint(folder.path()), "");
  ExpectError(CheckpointFingerprint(folder.File("no")).status(), kNotFound, "FILE_NOT_FOUND", {"no"});
}

}  // namespace
}  // namespace layerd
