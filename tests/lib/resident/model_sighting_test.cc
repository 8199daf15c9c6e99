// What stands in a folder of models beside models, and what the system refuses.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "lib/base/errors.h"
#include "tests/lib/resident/model_folders_testing.h"

namespace layerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ModelSightingTest : public ModelFoldersTest {};

TEST_F(ModelSightingTest, WhatIsNoFolderCannotBeOpened) {
  for (const std::string& path : {folder_.File("none"), folder_.Write("file", "")}) {
    const absl::Status status = ModelFolders::Open(path, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(DetailsOf(status).field, "models");
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
}

TEST_F(ModelSightingTest, FoldersWithOtherNamesAreNoModels) {
  Write(".hidden", 1);
  Write("has space", 1);
  fs::create_directories(Path("also not\n"));  // without a checkpoint
  Open();
  EXPECT_THAT(models_->List(), IsEmpty());
  EXPECT_THAT(Events(), ElementsAre(HasSubstr("has space: 0 + 0 first expected a name of at most 128 letters")));
  EXPECT_THAT(Checks(), ElementsAre(true));
  Look(3);
  EXPECT_THAT(Events(), IsEmpty());
}

TEST_F(ModelSightingTest, LinksLeadToFoldersInsideOnly) {
  const TemporaryFolder outside;
  Write("m", 1);
  Write(".v2", 2);
  fs::create_directory_symlink("m", Path("inside"));
  fs::copy(Path("m"), outside.File("x"), fs::copy_options::recursive);
  fs::create_directory_symlink(outside.File("x"), Path("outside"));
  fs::create_directory_symlink("..", Path("up"));
  fs::create_directory_symlink(".", Path("here"));
  fs::create_directory_symlink("nowhere", Path("broken"));
  Open();
  EXPECT_EQ(ValueOf("inside"), 1);
  for (const char* name : {"outside", "up", "here", "broken"}) EXPECT_FALSE(models_->HasModel(name)) << name;
  EXPECT_THAT(Checks(), ElementsAre(true));
  std::vector<std::string> refused;
  for (const std::string& event : Events()) {
    if (event.find("leads nowhere or elsewhere") != std::string::npos) refused.push_back(event.substr(0, 8));
  }
  EXPECT_THAT(refused, ElementsAre("broken: ", "here: 0 ", "outside:", "up: 0 + "));

  // A link that is turned to another folder changes its model.
  fs::create_directory_symlink(".v2", Path("new_link"));
  fs::rename(Path("new_link"), Path("inside"));
  Look(2);
  EXPECT_EQ(ValueOf("inside"), 2);
  EXPECT_EQ(ValueOf("m"), 1);
  fs::create_directory_symlink(outside.File("x"), Path("new_link"));
  fs::rename(Path("new_link"), Path("inside"));
  Look(2);
  EXPECT_EQ(ValueOf("inside"), 2);
  EXPECT_THAT(models_->WarningOf("inside"), HasSubstr("leads nowhere or elsewhere"));
}

TEST_F(ModelSightingTest, AFileLinkedFromOutsideIsNotRead) {
  const TemporaryFolder outside;
  Write("m", 1);
  fs::rename(Path("m") + "/model.safetensors", outside.File("model.safetensors"));
  fs::create_symlink(outside.File("model.safetensors"), Path("m") + "/model.safetensors");
  Open();
  EXPECT_TRUE(models_->HasModel("m"));
  EXPECT_THAT(Checks(), ElementsAre(false));
}

TEST_F(ModelSightingTest, ModelsOutliveTheFolderTheyAreIn) {
  Write("m", 1);
  Open();
  Events();
  Checks();
  const std::string moved = folder_.path() + "-moved";
  fs::rename(folder_.path(), moved);
  Look(3);
  EXPECT_EQ(ValueOf("m"), 1);
  EXPECT_THAT(Events(), ElementsAre(HasSubstr(": 0 + 0 file: cannot be read: ")));
  EXPECT_THAT(Checks(), ElementsAre(false));
  fs::rename(moved, folder_.path());
  Look(2);
  EXPECT_EQ(ValueOf("m"), 1);
  EXPECT_THAT(Checks(), ElementsAre(true));
}

// Leaves so many file descriptors to the process for as long as it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(int free) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    std::vector<int> opened;
    for (int i = 0; i < free; ++i) opened.push_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    rlimit few = before_;
    few.rlim_cur = static_cast<rlim_t>(opened.back()) + 1;
    for (const int descriptor : opened) close(descriptor);
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~FewDescriptors() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_;
};

TEST_F(ModelSightingTest, WhatFailsForTheMomentIsTriedAgain) {
  Open();
  Events();
  // Four files, each open as long as the model is.
  for (const auto& [name, tensor] : Tensors(1)) {
    fs::create_directories(Path("m"));
    ASSERT_TRUE(WriteSafetensors(Path("m") + "/" + name + ".safetensors", {{name, tensor}}).ok());
  }
  folder_.Write("m/config.json", kConfig);
  {
    const FewDescriptors enough_to_look(4);
    Look(4);
  }
  EXPECT_TRUE(models_->HasModel("m"));
  EXPECT_THAT(Events(), ElementsAre(HasSubstr("Too many open files")));  // said once
  Look();
  EXPECT_EQ(ValueOf("m"), 1);
  EXPECT_EQ(models_->WarningOf("m"), "");
}

}  // namespace
}  // namespace layerd
