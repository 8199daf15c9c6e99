// Files for the tests of lib/weights: folders of their own under the test's temporary folder, and the real test data.
#ifndef LAYERD_TESTS_LIB_WEIGHTS_TEST_FILES_H_
#define LAYERD_TESTS_LIB_WEIGHTS_TEST_FILES_H_

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lib/base/errors.h"

namespace layerd {

// A fresh folder, removed with everything in it when this object goes.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& base = ::testing::TempDir()) {
    static std::atomic<int> counter{0};
    path_ = absl::StrCat(base, "/layerd-weights-", getpid(), "-", counter++);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return absl::StrCat(path_, "/", name); }

  // Writes a file and returns its path.
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(File(name), std::ios::binary) << bytes;
    return File(name);
  }

 private:
  std::string path_;
};

inline std::string ReadWhole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// A safetensors file's bytes: length, `json`, `data_bytes` bytes 0, 1, 2, …
inline std::string SafetensorsBytes(const std::string& json, size_t data_bytes) {
  const uint64_t length = json.size();
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
  bytes += json;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i);
  return bytes;
}

// The path of a file of the test data (data/README.md there), empty where it is absent.
inline std::string TestData(const std::string& name) {
  const char* folder = std::getenv("LAYERD_TEST_DATA");
  const std::string root = folder != nullptr ? folder : absl::StrCat(LAYERD_SOURCE_DIR, "/../shared");
  const std::string path = absl::StrCat(root, "/data/", name);
  return std::filesystem::exists(path) ? path : std::string();
}

#define LAYERD_TEST_DATA_OR_SKIP(variable, name)         \
  const std::string variable = ::layerd::TestData(name); \
  if (variable.empty()) GTEST_SKIP() << "no test data " << (name) << "; set LAYERD_TEST_DATA"

// An error with this code and reason whose text has all of `parts`, and the field "file".
inline void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& reason,
                        std::initializer_list<std::string> parts) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(DetailsOf(status).reason, reason) << status;
  EXPECT_EQ(DetailsOf(status).field, "file") << status;
  EXPECT_LE(status.message().size(), kMaxErrorTextBytes + 3);
  for (const std::string& part : parts) EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
}

}  // namespace layerd

#endif  // LAYERD_TESTS_LIB_WEIGHTS_TEST_FILES_H_
