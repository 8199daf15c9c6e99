// The real test data that golden tests read (data/README.md and cases/ in the folder LAYERD_TEST_DATA).
#ifndef LAYERD_TESTS_GOLDEN_GOLDEN_FILES_H_
#define LAYERD_TESTS_GOLDEN_GOLDEN_FILES_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace layerd {

// The path of a file in the folder; empty where it is absent.
inline std::string GoldenFile(const std::string& name) {
  const char* folder = std::getenv("LAYERD_TEST_DATA");
  const std::string path = (folder != nullptr ? folder : std::string(LAYERD_SOURCE_DIR) + "/../shared") + "/" + name;
  return std::filesystem::exists(path) ? path : std::string();
}

inline nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

#define LAYERD_GOLDEN_OR_SKIP(variable, name)              \
  const std::string variable = ::layerd::GoldenFile(name); \
  if (variable.empty()) GTEST_SKIP() << "no test data " << (name) << "; set LAYERD_TEST_DATA"

}  // namespace layerd

#endif  // LAYERD_TESTS_GOLDEN_GOLDEN_FILES_H_
