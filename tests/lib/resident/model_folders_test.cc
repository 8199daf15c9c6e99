#include "lib/resident/model_folders.h"

#include <atomic>
#include <future>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "lib/base/errors.h"
#include "lib/resident/layer_library.h"
#include "lib/weights/layer_hash.h"
#include "tests/lib/resident/library_testing.h"
#include "tests/lib/resident/model_folders_testing.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(ModelFoldersTest, ReadsEveryModelAtTheFirstLook) {
  Write("a", 1);
  Write("a-b", 2);
  fs::create_directories(Path("no_model"));
  folder_.Write("README.md", "text");
  Open();
  EXPECT_EQ(ValueOf("a"), 1);
  EXPECT_EQ(ValueOf("a-b", kNorm), 2);
  EXPECT_THAT(Names(), ElementsAre(NameOf("a-b", kMlp), NameOf("a-b", kNorm), NameOf("a", kMlp), NameOf("a", kNorm)));
  EXPECT_THAT(Events(), ElementsAre("a: 2 + 0 llama first", "a-b: 2 + 0 llama first"));
  EXPECT_THAT(Checks(), ElementsAre(true));
  EXPECT_TRUE(models_->HasModel("a"));
  EXPECT_FALSE(models_->HasModel("no_model"));
  EXPECT_EQ(models_->WarningOf("a"), "");
  EXPECT_EQ(models_->WarningOf("none"), "");

  const auto record = *models_->Find(NameOf("a", kMlp));
  Look(3);
  EXPECT_EQ(*models_->Find(NameOf("a", kMlp)), record);  // the same object as long as nothing changes
  EXPECT_THAT(Events(), IsEmpty());
  EXPECT_THAT(Checks(), IsEmpty());
  for (const std::string& name : {NameOf("a", "none"), NameOf("none", kMlp), std::string("a"), std::string(),
                                  NameOf("../a", kMlp), NameOf("a/../a-b", kMlp)}) {
    EXPECT_EQ(models_->Find(name).status().code(), absl::StatusCode::kNotFound) << name;
  }
}

TEST_F(ModelFoldersTest, WhatIsNotReadYetIsNotDeniedEither) {
  Write("a", 1);
  std::promise<void> go_on;
  ModelFoldersOptions options;
  options.on_event = [done = go_on.get_future().share()](const ModelEvent&) { done.wait(); };
  const auto models = *ModelFolders::Open(folder_.path(), options);
  const absl::Status status = models->Find(NameOf("b", kMlp)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(DetailsOf(status).reason, "MODELS_NOT_READ");
  go_on.set_value();
  ASSERT_TRUE(models->WaitForFirstLook(absl::InfiniteFuture()));
  EXPECT_EQ(models->Find(NameOf("b", kMlp)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(layerd::ValueOf(models->Find(NameOf("a", kMlp))), 1);
}

TEST_F(ModelFoldersTest, AFolderWithoutModelsIsUsable) {
  Open();
  EXPECT_THAT(Checks(), ElementsAre(true));
  EXPECT_THAT(models_->List(), IsEmpty());
}

TEST_F(ModelFoldersTest, ANewModelComesOnceItHasStoppedChanging) {
  Open();
  Write("m", 1);
  Look();
  EXPECT_FALSE(models_->HasModel("m"));
  Write("m", 2);
  Look();
  EXPECT_FALSE(models_->HasModel("m"));
  Look();
  EXPECT_EQ(ValueOf("m"), 2);
  EXPECT_THAT(Events(), ElementsAre("m: 2 + 0 llama first"));
}

TEST_F(ModelFoldersTest, AChangedModelIsTakenUpWholeAndTheOldLayersCanStillBeRead) {
  Write("m", 1);
  Open();
  const auto old = models_->Find(NameOf("m", kMlp));
  Write("m", 2);
  Look();
  EXPECT_EQ(ValueOf("m"), 1);
  Look();
  EXPECT_EQ(ValueOf("m"), 2);
  EXPECT_EQ(ValueOf("m", kNorm), 2);
  EXPECT_EQ(layerd::ValueOf(old), 1);
  EXPECT_NE(*models_->Find(NameOf("m", kMlp)), *old);
  EXPECT_THAT(Events(), ElementsAre("m: 2 + 0 llama first", "m: 2 + 0 llama"));
  EXPECT_THAT(Checks(), ElementsAre(true, true));
}

TEST_F(ModelFoldersTest, AModelThatKeepsChangingIsLeftAsItIs) {
  Write("m", 1);
  Open();
  for (int i = 2; i < 6; ++i) {
    Write("m", static_cast<float>(i));
    Look();
    EXPECT_EQ(ValueOf("m"), 1);
  }
}

// What is seen of a model, and what is read of it a moment later, may be two versions.
TEST_F(ModelFoldersTest, AModelThatChangesWhileItIsReadIsReadAgain) {
  Write("a", 1);
  Write("b", 1);
  // The first look has seen both before it takes up one.
  on_event_ = [&, times = 0](const ModelEvent& event) mutable {
    if (event.model == "a" && ++times <= 2) Write("b", static_cast<float>(1 + times));
  };
  Open();
  EXPECT_THAT(Events(), ElementsAre("a: 2 + 0 llama first", "b: 0 + 0 first its files changed while they were read"));
  EXPECT_THAT(Checks(), ElementsAre(false));
  Look(2);
  EXPECT_EQ(ValueOf("b"), 2);
  EXPECT_THAT(Checks(), ElementsAre(true));

  // Once it was read, it stays as it was until it can be read anew.
  Write("a", 9);
  Write("b", 9);
  Look(2);
  EXPECT_EQ(ValueOf("a"), 9);
  EXPECT_EQ(ValueOf("b"), 2);
  EXPECT_EQ(models_->WarningOf("b"), "");
  Look();  // sees the third version of b
  EXPECT_EQ(ValueOf("b"), 2);
  Look();  // and that it has stopped changing
  EXPECT_EQ(ValueOf("b"), 3);
}

TEST_F(ModelFoldersTest, ALookThatRunsOutOfMemoryIsMadeUpForByTheNext) {
  Write("a", 1);
  Write("b", 1);
  on_event_ = [](const ModelEvent& event) {
    if (event.model == "a") throw std::bad_alloc();
  };
  Open();
  EXPECT_FALSE(models_->HasModel("b"));
  EXPECT_THAT(Checks(), IsEmpty());
  Look(2);
  EXPECT_EQ(ValueOf("a"), 1);
  EXPECT_EQ(ValueOf("b"), 1);
  EXPECT_TRUE(Checks().back());
}

TEST_F(ModelFoldersTest, ACorruptReplacementLeavesTheOldLayersAndSaysSo) {
  Write("m", 1);
  Open();
  Events();
  folder_.Write("new", "no safetensors file");
  fs::rename(folder_.File("new"), Path("m") + "/model.safetensors");
  Look(5);
  EXPECT_EQ(ValueOf("m"), 1);
  EXPECT_THAT(models_->WarningOf("m"), HasSubstr("cannot be used, and the layers before them still answer: file: "));
  const auto events = Events();
  ASSERT_EQ(events.size(), 1u);  // once, not at every look
  EXPECT_THAT(events[0], HasSubstr("m: 2 + 0 llama file: "));
  EXPECT_THAT(Checks(), ElementsAre(true, true));

  Write("m", 3);
  Look(2);
  EXPECT_EQ(ValueOf("m"), 3);
  EXPECT_EQ(models_->WarningOf("m"), "");
  EXPECT_THAT(Events(), ElementsAre("m: 2 + 0 llama"));
}

TEST_F(ModelFoldersTest, ADamagedConfigLeavesTheOldLayers) {
  Write("m", 1);
  Open();
  folder_.Write("m/config.json", "{");
  Look(2);
  EXPECT_EQ(ValueOf("m"), 1);
  EXPECT_THAT(models_->WarningOf("m"), HasSubstr("config.json"));
  EXPECT_EQ(models_->WarningOf("m").find(folder_.path()), std::string::npos);  // where it lies is nobody's business
}

TEST_F(ModelFoldersTest, AReplacementThatSpoilsALayerLeavesTheOldOnes) {
  Write("m", 1);
  Open();
  Events();
  auto tensors = Tensors(2);
  tensors.at("model.layers.0.mlp.up_proj.weight") = Tensor::Allocate(DType::kFloat32, {5, 4});
  Write("m", tensors);
  Look(2);
  EXPECT_EQ(ValueOf("m"), 1);
  EXPECT_EQ(ValueOf("m", kNorm), 1);
  EXPECT_THAT(models_->WarningOf("m"), HasSubstr("models/m/layers/model.layers.0.mlp: "));
  EXPECT_THAT(Events(), ElementsAre(HasSubstr("m: 2 + 0 llama layers that could be used no longer can: 1")));

  // Layers may go, when they do as a whole.
  for (const char* part : {"gate", "up", "down"})
    tensors.erase(absl::StrCat("model.layers.0.mlp.", part, "_proj.weight"));
  Write("m", tensors);
  Look(2);
  EXPECT_EQ(ValueOf("m", kNorm), 2);
  EXPECT_THAT(Names(), ElementsAre(NameOf("m", kNorm)));
  EXPECT_EQ(models_->WarningOf("m"), "");
}

TEST_F(ModelFoldersTest, AModelThatCannotBeReadIsNotUsableUntilItIsRepaired) {
  Write("bad", 1);
  Write("good", 1);
  folder_.Write("bad/config.json", "{");
  Open();
  EXPECT_THAT(Checks(), ElementsAre(false));
  EXPECT_TRUE(models_->HasModel("bad"));
  EXPECT_THAT(Names(), ElementsAre(NameOf("good", kMlp), NameOf("good", kNorm)));
  EXPECT_THAT(models_->WarningOf("bad"), HasSubstr("cannot be read: "));
  EXPECT_THAT(Events(), ElementsAre(HasSubstr("bad: 0 + 0 first "), "good: 2 + 0 llama first"));
  folder_.Write("bad/config.json", kConfig);
  Look(2);
  EXPECT_THAT(Checks(), ElementsAre(true));
  EXPECT_EQ(ValueOf("bad"), 1);
  EXPECT_EQ(models_->WarningOf("bad"), "");
}

TEST_F(ModelFoldersTest, OneUnusableLayerLeavesItsModelUsableAllOfThemDoNot) {
  auto tensors = Tensors(1);
  tensors.at("model.layers.0.mlp.up_proj.weight") = Tensor::Allocate(DType::kFloat32, {5, 4});
  Write("m", tensors);
  Open();
  EXPECT_THAT(Checks(), ElementsAre(true));
  EXPECT_THAT(Events(), ElementsAre("m: 1 + 1 llama first"));
  EXPECT_FALSE((*models_->Find(NameOf("m", kMlp)))->info().status.ok());
  tensors.erase("model.norm.weight");
  Write("n", tensors);
  Look(2);
  EXPECT_THAT(Checks(), ElementsAre(false));
  EXPECT_THAT(Events(), ElementsAre("n: 0 + 1 llama first"));
  EXPECT_EQ(Names().size(), 3u);  // listed all the same
}

TEST_F(ModelFoldersTest, AModelIsGoneWithItsFolderNotWithItsFiles) {
  Write("m", 1);
  Open();
  Events();
  fs::rename(Path("m") + "/model.safetensors", folder_.File("elsewhere"));
  Look(2);
  EXPECT_EQ(ValueOf("m"), 1);
  EXPECT_THAT(models_->WarningOf("m"), HasSubstr("its files are gone"));
  EXPECT_THAT(Events(), ElementsAre("m: 2 + 0 llama its files are gone, but not its folder"));
  fs::remove_all(Path("m"));
  Look();
  EXPECT_EQ(ValueOf("m"), 1);  // it may be about to be replaced
  Look();
  EXPECT_FALSE(models_->HasModel("m"));
  EXPECT_EQ(models_->Find(NameOf("m", kMlp)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Events(), ElementsAre("m: 0 + 0 gone"));
  Write("m", 2);
  Look(2);
  EXPECT_EQ(ValueOf("m"), 2);
  EXPECT_THAT(Events(), ElementsAre("m: 2 + 0 llama first"));
}

TEST_F(ModelFoldersTest, AFolderThatIsSwappedForAnotherIsNeverGone) {
  Write("m", 1);
  Write(".next", 2);
  Open();
  fs::rename(Path("m"), Path(".old"));
  Look();
  EXPECT_EQ(ValueOf("m"), 1);
  fs::rename(Path(".next"), Path("m"));
  Look();
  EXPECT_EQ(ValueOf("m"), 1);
  Look();
  EXPECT_EQ(ValueOf("m"), 2);
}

TEST_F(ModelFoldersTest, LooksByItself) {
  Open(absl::Milliseconds(1));
  Write("m", 1);
  AwaitEvents(1);
  EXPECT_EQ(ValueOf("m"), 1);
  fs::remove_all(Path("m"));
  AwaitEvents(2);
  EXPECT_FALSE(models_->HasModel("m"));
}

TEST_F(ModelFoldersTest, ALibraryAboveItGivesWhatIsThereNow) {
  Write("m", 1);
  Open();
  LayerLibrary library({models_.get()}, {.preloaded = {"models/m/*"}});
  const auto old = Acquire(library, NameOf("m", kMlp));
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(library.Get(NameOf("m", kMlp))->info.content_hash, (*old)->content_hash);
  Write("m", 2);
  Look(2);
  EXPECT_EQ(library.Get(NameOf("m", kMlp))->info.content_hash, "");
  library.Preload();
  const auto now = Acquire(library, NameOf("m", kMlp));
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_NE((*now)->content_hash, (*old)->content_hash);
  EXPECT_EQ((*now)->content_hash, ContentHash(LayerOf(**now)));
  folder_.Write("m/config.json", "[]");
  Look(2);
  EXPECT_EQ(*Acquire(library, NameOf("m", kMlp)), *now);
  EXPECT_THAT(library.Get(NameOf("m", kMlp))->warning, HasSubstr("still answer"));

  // Written over in place, the files are not what the layers were made from.
  folder_.Write("m/config.json", kConfig);
  Write("m", 3);
  Look(2);
  std::string bytes = ReadWhole(Path("m") + "/model.safetensors");
  folder_.Write("m/model.safetensors", bytes);
  const absl::Status status = Acquire(library, NameOf("m", kMlp)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(status).reason, "LAYER_DAMAGED");
  EXPECT_EQ(DetailsOf(status).field, "layer");
  Look(2);
  EXPECT_TRUE(Acquire(library, NameOf("m", kMlp)).ok());
}

TEST_F(ModelFoldersTest, ServesARealModelFromAFolder) {
  LAYERD_TEST_DATA_OR_SKIP(data, "stories260k");
  fs::create_directories(Path("stories260k"));
  fs::copy(data + "/config.json", Path("stories260k"));
  fs::copy(data + "/stories260k.bf16.safetensors", Path("stories260k") + "/model.safetensors");
  Open();
  EXPECT_THAT(Events(), ElementsAre("stories260k: 16 + 0 llama first"));
  LayerLibrary library({models_.get()}, {});
  for (const auto& record : models_->List()) {
    const auto layer = Acquire(library, record->info().name);
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_EQ((*layer)->content_hash, ContentHash(*record->Read()));
  }
  EXPECT_EQ(library.stats().prepared, 16);
}

// Readers see all layers of one version, whatever happens meanwhile.
TEST_F(ModelFoldersTest, UnderChangeEveryListIsOfOneVersion) {
  constexpr int kVersions = 30;
  Write("m", 0);
  Open();
  std::atomic<bool> over = false;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!over) {
        const auto layers = models_->List();
        ASSERT_EQ(layers.size(), 2u);
        EXPECT_EQ(layerd::ValueOf(layers[0]), layerd::ValueOf(layers[1]));
        EXPECT_GE(ValueOf("m"), 0);
        models_->WarningOf("m");
      }
    });
  }
  for (int version = 1; version <= kVersions; ++version) {
    Write("m", static_cast<float>(version));
    Look(2);
    if (version % 5 != 0) continue;
    folder_.Write("damaged", "");
    fs::rename(folder_.File("damaged"), Path("m") + "/model.safetensors");
    Look(2);
  }
  over = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(ValueOf("m"), kVersions);
}

}  // namespace
}  // namespace layerd
