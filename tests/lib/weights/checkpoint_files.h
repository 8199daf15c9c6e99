// Checkpoints for tests: folders with small tensors, whose values differ from one tensor to the next.
#ifndef LAYERD_TESTS_LIB_WEIGHTS_CHECKPOINT_FILES_H_
#define LAYERD_TESTS_LIB_WEIGHTS_CHECKPOINT_FILES_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/weights/checkpoint.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/safetensors.h"
#include "tests/lib/weights/test_files.h"

namespace layerd {

using Shapes = std::map<std::string, Shape>;

// Values that depend on the name.
inline Tensor TensorNamed(const std::string& name, const Shape& shape, DType dtype = DType::kFloat32) {
  std::vector<float> values(*NumElements(shape));
  const size_t seed = std::hash<std::string>()(name) % 1000;
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(seed + i) / 64.0f;
  return Tensor::FromFloats(dtype, shape, values);
}

inline void WriteTensors(const std::string& path, const Shapes& shapes, DType dtype = DType::kFloat32) {
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, shape] : shapes) tensors.emplace(name, TensorNamed(name, shape, dtype));
  const absl::Status written = WriteSafetensors(path, tensors);
  EXPECT_TRUE(written.ok()) << written;
}

// A folder with model.safetensors, and perhaps config.json and layerd.json.
class Model {
 public:
  explicit Model(const Shapes& shapes, const std::string& config = "", const std::string& description = "") {
    WriteTensors(folder_.File("model.safetensors"), shapes);
    if (!config.empty()) folder_.Write("config.json", config);
    if (!description.empty()) folder_.Write("layerd.json", description);
  }

  const TemporaryFolder& folder() const { return folder_; }
  absl::StatusOr<Checkpoint> Open(const CheckpointHints& hints = {}) const {
    return Checkpoint::Open(folder_.path(), "m", hints);
  }

 private:
  TemporaryFolder folder_;
};

inline std::string OwnName(const LayerRecord& layer) { return ParseLayerName(layer.info().name)->layer; }

// The layers by their own names, in the words of Description().
inline std::map<std::string, std::string> Described(const absl::StatusOr<Checkpoint>& checkpoint) {
  std::map<std::string, std::string> described;
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  if (!checkpoint.ok()) return described;
  for (const auto& layer : checkpoint->layers()) described[OwnName(*layer)] = Description(layer->info());
  return described;
}

// The state of one layer; an error where there is none.
inline absl::Status StatusOf(const absl::StatusOr<Checkpoint>& checkpoint, const std::string& name) {
  if (!checkpoint.ok()) return checkpoint.status();
  const auto layer = checkpoint->Find(name);
  if (!layer.ok()) return layer.status();
  // What cannot be used cannot be read, and says the same.
  const absl::Status read = (*layer)->Read().status();
  EXPECT_EQ(read, (*layer)->info().status) << name;
  return read;
}

inline void ExpectUnusable(const absl::Status& status, const std::string& reason,
                           std::initializer_list<std::string> parts) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(DetailsOf(status).reason, reason) << status;
  EXPECT_LE(status.message().size(), kMaxErrorTextBytes + 3);
  for (const std::string& part : parts) EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
}

// The weight `role` of `layer`; an empty tensor where it has none.
inline Tensor WeightOf(const absl::StatusOr<Layer>& layer, const std::string& role) {
  EXPECT_TRUE(layer.ok()) << layer.status();
  if (layer.ok()) {
    for (const auto& [one, tensor] : WeightsOf(*layer)) {
      if (one == role) return tensor;
    }
  }
  ADD_FAILURE() << "no weight " << role;
  return Tensor();
}

// "activation: silu (config.json: hidden_act)", one line for each option.
inline std::vector<std::string> InferredOf(const absl::StatusOr<Checkpoint>& checkpoint, const std::string& name) {
  std::vector<std::string> lines;
  const auto layer = checkpoint->Find(name);
  EXPECT_TRUE(layer.ok()) << layer.status();
  if (!layer.ok()) return lines;
  for (const Inference& one : (*layer)->info().inferred) {
    lines.push_back(absl::StrCat(one.option, ": ", one.value, " (", one.source, ")"));
  }
  return lines;
}

// The tensors of Llama's feed-forward layer in the module `path`, d 4 and h 6.
inline Shapes GateUpDown(const std::string& path) {
  return {
      {path + ".gate_proj.weight", {6, 4}}, {path + ".up_proj.weight", {6, 4}}, {path + ".down_proj.weight", {4, 6}}};
}

template <typename T>
std::map<std::string, T> operator+(std::map<std::string, T> a, const std::map<std::string, T>& b) {
  a.insert(b.begin(), b.end());
  return a;
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_WEIGHTS_CHECKPOINT_FILES_H_
