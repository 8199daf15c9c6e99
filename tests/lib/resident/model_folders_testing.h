// For the tests of model folders: models of two layers whose weights are all one number, so that versions are told apart.
#ifndef LAYERD_TESTS_LIB_RESIDENT_MODEL_FOLDERS_TESTING_H_
#define LAYERD_TESTS_LIB_RESIDENT_MODEL_FOLDERS_TESTING_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lib/resident/model_folders.h"
#include "lib/weights/safetensors.h"
#include "tests/lib/weights/test_files.h"

namespace layerd {

namespace fs = std::filesystem;

inline constexpr char kConfig[] = R"({"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-05})";
inline constexpr char kMlp[] = "model.layers.0.mlp", kNorm[] = "model.norm";

// All of what a Llama of one layer, d 4 and h 6, has for us; every element is `value`.
inline std::map<std::string, Tensor> Tensors(float value) {
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, shape] : std::map<std::string, Shape>{{"model.layers.0.mlp.gate_proj.weight", {6, 4}},
                                                                {"model.layers.0.mlp.up_proj.weight", {6, 4}},
                                                                {"model.layers.0.mlp.down_proj.weight", {4, 6}},
                                                                {"model.norm.weight", {4}}}) {
    tensors.emplace(name, Tensor::FromFloats(DType::kFloat32, shape, std::vector<float>(*NumElements(shape), value)));
  }
  return tensors;
}

inline std::string NameOf(const std::string& model, const std::string& layer) {
  return absl::StrCat("models/", model, "/layers/", layer);
}

// The element that all weights of the layer have.
inline float ValueOf(const absl::StatusOr<std::shared_ptr<const LayerRecord>>& record) {
  if (!record.ok()) return -1;
  const auto layer = (*record)->Read();
  EXPECT_TRUE(layer.ok()) << layer.status();
  if (!layer.ok()) return -2;
  const auto weights = WeightsOf(*layer);
  for (const auto& [role, tensor] : weights) {
    for (const float value : tensor.ToFloats()) EXPECT_EQ(value, weights.front().second.At(0)) << role;
  }
  return weights.front().second.At(0);
}

class ModelFoldersTest : public testing::Test {
 protected:
  std::string Path(const std::string& model) const { return folder_.File(model); }

  // Writes a model, or replaces its weights by new files.
  void Write(const std::string& model, float value) const { Write(model, Tensors(value)); }
  void Write(const std::string& model, const std::map<std::string, Tensor>& tensors) const {
    fs::create_directories(Path(model));
    if (!fs::exists(Path(model) + "/config.json")) folder_.Write(model + "/config.json", kConfig);
    const absl::Status written = WriteSafetensors(Path(model) + "/model.safetensors", tensors);
    ASSERT_TRUE(written.ok()) << written;
  }

  // Opens the folder, and waits until every model was looked at. Afterwards it looks when told to.
  void Open(absl::Duration look_every = absl::InfiniteDuration()) {
    ModelFoldersOptions options;
    options.look_every = look_every;
    options.on_event = [this](const ModelEvent& event) {
      std::lock_guard<std::mutex> lock(mutex_);
      events_.push_back(event);
      changed_.notify_all();
      if (on_event_) on_event_(event);
    };
    options.on_checked = [this](bool all_usable) {
      std::lock_guard<std::mutex> lock(mutex_);
      checks_.push_back(all_usable);
    };
    auto opened = ModelFolders::Open(folder_.path(), options);
    ASSERT_TRUE(opened.ok()) << opened.status();
    models_ = *std::move(opened);
    ASSERT_TRUE(models_->WaitForFirstLook(absl::InfiniteFuture()));
  }
  void Look(int times = 1) {
    for (int i = 0; i < times; ++i) models_->LookNow();
  }

  // What has happened since this was asked before: "a: 2 + 0 llama first".
  std::vector<std::string> Events() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> texts;
    for (const ModelEvent& event : events_) {
      texts.push_back(absl::StrCat(event.model, ": ", event.layers, " + ", event.unusable_layers,
                                   event.family.empty() ? "" : " ", event.family, event.first ? " first" : "",
                                   event.gone ? " gone" : "", event.status.ok() ? "" : " ",
                                   event.status.ok() ? "" : event.status.message()));
    }
    events_.clear();
    return texts;
  }
  // What on_checked said since this was asked before.
  std::vector<bool> Checks() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(checks_, {});
  }
  void AwaitEvents(size_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return events_.size() >= number; });
  }

  float ValueOf(const std::string& model, const std::string& layer = kMlp) {
    return layerd::ValueOf(models_->Find(NameOf(model, layer)));
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (const auto& layer : models_->List()) names.push_back(layer->info().name);
    return names;
  }

  TemporaryFolder folder_;
  std::function<void(const ModelEvent&)> on_event_;  // called with each event; to be set before Open()
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ModelEvent> events_;
  std::vector<bool> checks_;
  std::unique_ptr<ModelFolders> models_;  // last: its thread calls back
};

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_RESIDENT_MODEL_FOLDERS_TESTING_H_
