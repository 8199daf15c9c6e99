// The folder of a checkpoint, whose files are opened inside it only.
//
// A file is reached by its plain name; what was opened must lie in the folder, so a link out of it is refused and a link
// within is followed. All files come from the folder that was opened, even where another takes its name meanwhile.
//
// Errors have the field "file": those of lib/weights/file_io.h, and INVALID_ARGUMENT, reason CHECKPOINT_OUTSIDE.
#ifndef LAYERD_LIB_WEIGHTS_CHECKPOINT_FOLDER_H_
#define LAYERD_LIB_WEIGHTS_CHECKPOINT_FOLDER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "lib/weights/file_io.h"

namespace layerd {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kDescriptionFile[] = "layerd.json";
inline constexpr char kWeightsFile[] = "model.safetensors";
inline constexpr char kIndexFile[] = "model.safetensors.index.json";

// Whether `name` is that of a safetensors file in a folder: it ends in .safetensors, begins with no dot, and has neither
// separator nor NUL.
bool IsSafetensorsName(std::string_view name);

// Whether the open file `file` is what `name` in `folder` is now, links resolved, and lies in that folder. Where the system
// tells by no other way (without /proc) where an open file lies.
bool LiesInByPath(int file, const std::string& name, const std::string& folder);

// Owns the open folder. Threads: const methods from any number of threads.
class CheckpointFolder {
 public:
  static absl::StatusOr<CheckpointFolder> Open(const std::string& path);

  ~CheckpointFolder();
  CheckpointFolder(CheckpointFolder&& other) noexcept;
  CheckpointFolder& operator=(CheckpointFolder&&) = delete;

  const std::string& path() const { return path_; }
  absl::StatusOr<InputFile> OpenFile(const std::string& name) const;
  // The whole file; nothing where there is none. INVALID_ARGUMENT, reason `reason`, where it has more than `max_bytes`.
  absl::StatusOr<std::optional<std::string>> ReadText(const std::string& name, uint64_t max_bytes,
                                                      std::string_view reason) const;
  // The names of its safetensors files, in order.
  absl::StatusOr<std::vector<std::string>> SafetensorsNames() const;
  // CheckpointFingerprint() of lib/weights/checkpoint.h.
  absl::StatusOr<std::string> Fingerprint() const;

 private:
  CheckpointFolder(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}

  bool Contains(const InputFile& file, const std::string& name) const;

  int descriptor_;
  std::string path_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_CHECKPOINT_FOLDER_H_
