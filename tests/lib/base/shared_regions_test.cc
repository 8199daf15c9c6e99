#include "lib/base/shared_regions.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "tests/lib/base/temporary_folder.h"

namespace layerd {
namespace {

class SharedRegionsTest : public testing::Test {
 protected:
  SharedRegionsTest() {
    auto opened = SharedRegions::Open(folder_.path());
    EXPECT_TRUE(opened.ok()) << opened.status();
    regions_ = *std::move(opened);
  }

  void ExpectRefused(const absl::Status& status, absl::StatusCode code, const std::string& field,
                     const std::string& reason) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(DetailsOf(status).field, field) << status;
    EXPECT_EQ(DetailsOf(status).reason, reason) << status;
  }
  absl::Status Register(const std::string& name, const std::string& file) {
    return regions_->Register(name, file).status();
  }

  const TemporaryFolder folder_;
  std::unique_ptr<SharedRegions> regions_;
};

TEST_F(SharedRegionsTest, ARegionIsItsFile) {
  const std::string path = folder_.File("a.bin", 5000);
  const auto entry = regions_->Register("A-1.x_y", "a.bin");
  ASSERT_TRUE(entry.ok()) << entry.status();
  EXPECT_EQ(entry->name, "A-1.x_y");
  EXPECT_EQ(entry->region->size_bytes(), 5000);
  EXPECT_EQ(entry->region->file(), "a.bin");
  entry->region->data()[4999] = std::byte{9};
  const auto found = regions_->Find("A-1.x_y");
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(*found, entry->region);
  EXPECT_TRUE((*found)->CheckIntact().ok());
}

TEST_F(SharedRegionsTest, TheSameAgainChangesNothing) {
  folder_.File("a", 100);
  const auto first = regions_->Register("r", "a");
  const auto second = regions_->Register("r", "a");
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->region, second->region);
}

TEST_F(SharedRegionsTest, ANameHasOneFileAndAFileOneName) {
  folder_.File("a", 100);
  folder_.File("b", 100);
  ASSERT_EQ(link((folder_ / "a").c_str(), (folder_ / "hard_link").c_str()), 0);
  ASSERT_TRUE(Register("r", "a").ok());
  ExpectRefused(Register("r", "b"), absl::StatusCode::kAlreadyExists, "name", "REGION_EXISTS");
  ExpectRefused(Register("s", "a"), absl::StatusCode::kAlreadyExists, "file", "REGION_EXISTS");
  ExpectRefused(Register("s", "hard_link"), absl::StatusCode::kAlreadyExists, "file", "REGION_EXISTS");
  ASSERT_TRUE(regions_->Unregister("r").ok());
  EXPECT_TRUE(Register("r", "b").ok());
  EXPECT_TRUE(Register("s", "a").ok());
}

// A file that was made anew under its old name is another one.
TEST_F(SharedRegionsTest, AFileMadeAnewIsAnotherFile) {
  folder_.File("a", 100);
  ASSERT_TRUE(Register("r", "a").ok());
  unlink((folder_ / "a").c_str());
  folder_.File("a", 100);
  ExpectRefused(Register("r", "a"), absl::StatusCode::kAlreadyExists, "name", "REGION_EXISTS");
}

TEST_F(SharedRegionsTest, WhatIsNoFileOfTheFolderIsRefused) {
  const TemporaryFolder outside;
  outside.File("secret", 100);
  std::filesystem::create_directory(folder_ / "folder");
  std::filesystem::create_symlink(outside / "secret", folder_ / "link");
  std::filesystem::create_symlink("file", folder_ / "link_inside");
  std::filesystem::create_directory_symlink(outside.path(), folder_ / "folder_link");
  folder_.File("file", 100);
  folder_.File("empty", 0);
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (folder_ / "socket").c_str(), sizeof(address.sun_path) - 1);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);

  for (const std::string file : {".", "..", "/etc/passwd", "folder/x", "../secret", "folder_link/secret", "./file"}) {
    SCOPED_TRACE(file);
    ExpectRefused(Register("r", file), absl::StatusCode::kInvalidArgument, "file", "BAD_NAME");
  }
  ExpectRefused(Register("r", outside / "secret"), absl::StatusCode::kInvalidArgument, "file", "BAD_NAME");
  ExpectRefused(Register("r", std::string("file\0x", 6)), absl::StatusCode::kInvalidArgument, "file", "BAD_NAME");
  for (const char* file : {"folder", "link", "link_inside", "folder_link", "fifo", "socket"}) {
    SCOPED_TRACE(file);
    ExpectRefused(Register("r", file), absl::StatusCode::kInvalidArgument, "file", "NOT_A_REGULAR_FILE");
  }
  ExpectRefused(Register("r", ""), absl::StatusCode::kInvalidArgument, "file", "MISSING");
  ExpectRefused(Register("r", "absent"), absl::StatusCode::kNotFound, "file", "FILE_NOT_FOUND");
  ExpectRefused(Register("r", "empty"), absl::StatusCode::kFailedPrecondition, "file", "EMPTY_FILE");
  ExpectRefused(Register("r", std::string(5000, 'x')), absl::StatusCode::kFailedPrecondition, "file",
                "FILE_NOT_OPENED");
  EXPECT_TRUE(regions_->List().empty());
  close(listener);
}

TEST_F(SharedRegionsTest, NamesAreChecked) {
  folder_.File("a", 100);
  ExpectRefused(Register("", "a"), absl::StatusCode::kInvalidArgument, "name", "MISSING");
  for (const std::string& name : {std::string("a/b"), std::string("a b"), std::string("\xFF"), std::string("a\0b", 3),
                                  std::string(SharedRegions::kMostNameBytes + 1, 'a')}) {
    ExpectRefused(Register(name, "a"), absl::StatusCode::kInvalidArgument, "name", "BAD_NAME");
  }
  EXPECT_TRUE(Register(std::string(SharedRegions::kMostNameBytes, 'a'), "a").ok());
}

TEST_F(SharedRegionsTest, UnknownRegionsAreNotFound) {
  ExpectRefused(regions_->Find("r").status(), absl::StatusCode::kNotFound, "region", "REGION_NOT_FOUND");
  ExpectRefused(regions_->Unregister("r"), absl::StatusCode::kNotFound, "name", "REGION_NOT_FOUND");
  EXPECT_LT(regions_->Find(std::string(100000, 'x')).status().message().size(), kMaxErrorTextBytes);
}

TEST_F(SharedRegionsTest, ATruncatedFileIsRefusedUntilItIsWhole) {
  const std::string path = folder_.File("a", 10000);
  ASSERT_TRUE(Register("r", "a").ok());
  std::filesystem::resize_file(path, 9999);
  ExpectRefused(regions_->Find("r").status(), absl::StatusCode::kFailedPrecondition, "", "REGION_TRUNCATED");
  std::filesystem::resize_file(path, 10000);
  EXPECT_TRUE(regions_->Find("r").ok());  // nobody has met the hole
}

TEST_F(SharedRegionsTest, ADamagedRegionIsRefusedUntilItIsRegisteredAgain) {
  const std::string path = folder_.File("a", 10000);
  const auto old = regions_->Register("r", "a");
  ASSERT_TRUE(old.ok());
  std::filesystem::resize_file(path, 0);
  old->region->data()[5000] = std::byte{5};
  ExpectRefused(old->region->CheckIntact(), absl::StatusCode::kFailedPrecondition, "", "REGION_TRUNCATED");
  std::filesystem::resize_file(path, 10000);
  ExpectRefused(regions_->Find("r").status(), absl::StatusCode::kFailedPrecondition, "", "REGION_DAMAGED");
  ExpectRefused(Register("r", "a"), absl::StatusCode::kFailedPrecondition, "file", "SPARSE_FILE");
  folder_.Fill("a", 10000);
  const auto anew = regions_->Register("r", "a");
  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_NE(anew->region, old->region);
  EXPECT_TRUE(regions_->Find("r").ok());
  old->region->data()[5000] = std::byte{1};  // still there for whoever has it, but not the file's any more
  EXPECT_EQ(anew->region->data()[5000], std::byte{0});
}

TEST_F(SharedRegionsTest, AFileThatHasGrownIsMappedAnew) {
  folder_.File("a", 10000);
  ASSERT_TRUE(Register("r", "a").ok());
  folder_.Fill("a", 20000);
  EXPECT_EQ((*regions_->Find("r"))->size_bytes(), 10000);
  EXPECT_EQ(regions_->Register("r", "a")->region->size_bytes(), 20000);
  EXPECT_EQ((*regions_->Find("r"))->size_bytes(), 20000);
}

TEST_F(SharedRegionsTest, RegionsOutliveTheirNames) {
  folder_.File("a", 100);
  const auto entry = regions_->Register("r", "a");
  ASSERT_TRUE(entry.ok());
  ASSERT_TRUE(regions_->Unregister("r").ok());
  unlink((folder_ / "a").c_str());
  entry->region->data()[99] = std::byte{1};
  regions_.reset();
  EXPECT_TRUE(entry->region->CheckIntact().ok());
}

TEST_F(SharedRegionsTest, ThereAreOnlySoMany) {
  for (size_t i = 0; i <= SharedRegions::kMostRegions; ++i) folder_.File(absl::StrCat("f", i), 1);
  for (size_t i = 0; i < SharedRegions::kMostRegions; ++i) {
    ASSERT_TRUE(Register(absl::StrCat("r", i), absl::StrCat("f", i)).ok());
  }
  const std::string last = absl::StrCat("f", SharedRegions::kMostRegions);
  ExpectRefused(Register("last", last), absl::StatusCode::kResourceExhausted, "name", "TOO_MANY_REGIONS");
  EXPECT_TRUE(Register("r5", "f5").ok());
  ASSERT_TRUE(regions_->Unregister("r7").ok());
  EXPECT_TRUE(Register("last", last).ok());
  EXPECT_EQ(regions_->List().size(), SharedRegions::kMostRegions);
  EXPECT_EQ(regions_->List().front().name, "last");
}

TEST(SharedRegionsFolderTest, AFolderThatCannotBeOpenedIsRefused) {
  const TemporaryFolder folder;
  for (const std::string& path : {folder / "absent", folder.File("file", 1)}) {
    const auto status = SharedRegions::Open(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(std::string(status.message()).find(path), std::string::npos);
  }
}

}  // namespace
}  // namespace layerd
