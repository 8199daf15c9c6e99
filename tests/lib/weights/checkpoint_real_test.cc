// Checkpoints of trained models.
#include <filesystem>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/lib/weights/checkpoint_files.h"

namespace layerd {
namespace {

namespace fs = std::filesystem;

constexpr char kKwtDescription[] = R"({"layers":[
  {"layer": "layers.{i}.ln1",
   "normalize": {"kind": "layer_norm", "epsilon": 9.999999974752427e-07, "rounding": "after_gamma"},
   "weights": {"gamma": "layers.{i}.ln1.weight", "beta": "layers.{i}.ln1.bias"}},
  {"layer": "layers.{i}.ln2",
   "normalize": {"kind": "layer_norm", "epsilon": 9.999999974752427e-07, "rounding": "after_gamma"},
   "weights": {"gamma": "layers.{i}.ln2.weight", "beta": "layers.{i}.ln2.bias"}},
  {"layer": "layers.{i}.ffn",
   "feed_forward": {"form": "plain", "activation": "gelu_tanh", "layout": "out_in"},
   "weights": {"up": "layers.{i}.fc1.weight", "up_bias": "layers.{i}.fc1.bias",
               "down": "layers.{i}.fc2.weight", "down_bias": "layers.{i}.fc2.bias"}}]})";

// Every layer reads the very bits of its tensors; how many layers there are.
size_t ExpectTensorsOf(const Checkpoint& checkpoint, const std::string& path) {
  const auto file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  for (const auto& layer : checkpoint.layers()) {
    const auto read = layer->Read();
    EXPECT_TRUE(read.ok()) << layer->info().name << ": " << read.status();
    for (const auto& [role, name] : layer->info().tensors) {
      EXPECT_TRUE(SameBits(WeightOf(read, role), *file->Read(name))) << name;
    }
  }
  return checkpoint.layers().size();
}

TEST(CheckpointRealFile, Stories260k) {
  for (const std::string dtype : {"f32", "bf16"}) {
    const std::string name = absl::StrCat("stories260k.", dtype, ".safetensors");
    LAYERD_TEST_DATA_OR_SKIP(path, "stories260k/" + name);
    const TemporaryFolder folder;
    fs::copy_file(path, folder.File(name));
    fs::copy_file(fs::path(path).parent_path() / "config.json", folder.File("config.json"));
    const auto checkpoint = Checkpoint::Open(folder.path(), "stories260k");
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->family(), "llama");
    EXPECT_EQ(ExpectTensorsOf(*checkpoint, path), 16);
    auto described = Described(checkpoint);
    const std::string suffix = dtype == "f32" ? "F32" : "BF16";
    EXPECT_EQ(described["model.layers.4.mlp"], "gated: gate, up, down [out, in]; silu; d 64, h 172; " + suffix);
    EXPECT_EQ(described["model.norm"], "rms_norm; eps 1e-05; before_gamma; d 64; " + suffix);
    EXPECT_EQ(described["model.layers.0.input_layernorm"], described["model.norm"]);
    EXPECT_EQ((*checkpoint->Find("model.norm"))->info().name, "models/stories260k/layers/model.norm");
  }
}

TEST(CheckpointRealFile, Kwt1ByADescription) {
  LAYERD_TEST_DATA_OR_SKIP(path, "kwt1/kwt1_ffn_norm.f32.safetensors");
  const TemporaryFolder folder;
  fs::copy_file(path, folder.File("kwt1_ffn_norm.f32.safetensors"));
  folder.Write("layerd.json", kKwtDescription);
  const auto checkpoint = Checkpoint::Open(folder.path(), "kwt1");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "layerd.json");
  EXPECT_EQ(ExpectTensorsOf(*checkpoint, path), 36);
  auto described = Described(checkpoint);
  EXPECT_EQ(described["layers.11.ffn"], "plain: up, down [out, in], biases; gelu_tanh; d 64, h 256; F32");
  EXPECT_EQ(described["layers.0.ln2"], "layer_norm, bias; eps 9.999999974752427e-07; after_gamma; d 64; F32");
}

TEST(CheckpointRealFile, Kwt1ByItsNamesAlone) {
  LAYERD_TEST_DATA_OR_SKIP(path, "kwt1/kwt1_ffn_norm.f32.safetensors");
  const auto checkpoint = Checkpoint::Open(path, "local", {.activation = Activation::kGelu, .norm_epsilon = 1e-6});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(ExpectTensorsOf(*checkpoint, path), 36);
  EXPECT_EQ(Described(checkpoint)["layers.11"], "plain: up, down [out, in], biases; gelu; d 64, h 256; F32");
}

// Mixtral's names beside a Llama's config.json, which does not speak for them.
TEST(CheckpointRealFile, Stories260kExperts) {
  LAYERD_TEST_DATA_OR_SKIP(path, "stories260k/moe5_from_layers.f32.safetensors");
  const std::string expert = "model.layers.0.block_sparse_moe.experts.3";
  ExpectUnusable(StatusOf(Checkpoint::Open(path, "local"), expert), "LAYER_OPTIONS_OPEN", {"activation"});
  const auto checkpoint = Checkpoint::Open(path, "local", {.activation = Activation::kSilu});
  EXPECT_EQ(Described(checkpoint)[expert], "gated: gate, up, down [out, in]; silu; d 64, h 172; F32");
  EXPECT_EQ(ExpectTensorsOf(*checkpoint, path), 5);
  ExpectError(checkpoint->Find("model.layers.0.block_sparse_moe").status(), absl::StatusCode::kNotFound,
              "NO_SUCH_LAYER", {"experts.0"});
}

}  // namespace
}  // namespace layerd
