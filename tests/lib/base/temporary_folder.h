// A folder for a test's files that goes with the test.
#ifndef LAYERD_TESTS_LIB_BASE_TEMPORARY_FOLDER_H_
#define LAYERD_TESTS_LIB_BASE_TEMPORARY_FOLDER_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace layerd {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = testing::TempDir() + "layerd_XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // A new file of so many zeros, which are written.
  std::string File(const std::string& name, size_t bytes) const {
    const std::string path = *this / name;
    std::ofstream(path, std::ios::binary) << std::string(bytes, '\0');
    EXPECT_EQ(std::filesystem::file_size(path), bytes);
    return path;
  }
  // Gives the file memory for so many bytes.
  void Fill(const std::string& name, int64_t bytes) const {
    const int fd = open((*this / name).c_str(), O_RDWR);
    EXPECT_EQ(posix_fallocate(fd, 0, bytes), 0);
    close(fd);
  }

 private:
  std::string path_;
};

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_BASE_TEMPORARY_FOLDER_H_
