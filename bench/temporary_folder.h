// A folder for what a benchmark needs while it runs.
#ifndef LAYERD_BENCH_TEMPORARY_FOLDER_H_
#define LAYERD_BENCH_TEMPORARY_FOLDER_H_

#include <filesystem>
#include <string>

namespace layerd::bench {

// Made new in `parent`, and removed with all that is in it at the end.
class TemporaryFolder {
 public:
  // Ends the program with a message where it cannot be made.
  explicit TemporaryFolder(const std::filesystem::path& parent = std::filesystem::temp_directory_path());
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_TEMPORARY_FOLDER_H_
