#include "lib/resident/model_sighting.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "lib/base/errors.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_name.h"

namespace layerd {
namespace {

namespace fs = std::filesystem;

Sighting See(const fs::directory_entry& entry, const std::string& name, const std::string& real_folder) {
  std::error_code error;
  Sighting sighting;
  const bool is_link = entry.is_symlink(error);
  if (!is_link && !entry.is_directory(error)) return sighting;
  sighting.path = is_link ? fs::canonical(entry.path(), error).string() : entry.path().string();
  const std::string inside = real_folder == "/" ? real_folder : real_folder + "/";
  if (is_link && (error || sighting.path.rfind(inside, 0) != 0)) {
    sighting.kind = Sighting::kForbidden;
    sighting.status =
        NoModel("expected a folder, or a link to one beside it, got a link that leads nowhere or elsewhere");
    sighting.path.clear();
    return sighting;
  }
  if (is_link && !fs::is_directory(sighting.path, error)) return {};
  auto fingerprint = CheckpointFingerprint(sighting.path);
  if (fingerprint.status().code() == absl::StatusCode::kNotFound) return {};
  if (!fingerprint.ok()) {
    sighting.kind = Sighting::kUnreadable;
    sighting.status = WithoutPath(fingerprint.status(), sighting.path, name);
  } else if (fingerprint->empty()) {
    sighting.kind = Sighting::kNoModel;
  } else if (!IsNamePart(name)) {
    sighting.kind = Sighting::kForbidden;
    sighting.status = NoModel(absl::StrCat("expected a name of at most ", kMaxNamePartBytes,
                                           " letters, digits, '.', '_' and '-', got ", Quoted(name)));
  } else {
    sighting.kind = Sighting::kFiles;
    sighting.fingerprint = *std::move(fingerprint);
  }
  return sighting;
}

}  // namespace

absl::Status NoModel(std::string_view text) {
  ErrorDetails details;
  details.reason = "NO_MODEL";
  return WithDetails(absl::StatusCode::kFailedPrecondition, text, details);
}

absl::Status WithoutPath(const absl::Status& status, const std::string& path, const std::string& model) {
  if (status.ok()) return status;
  return WithDetails(status.code(), absl::StrReplaceAll(status.message(), {{path, model}}), DetailsOf(status));
}

absl::StatusOr<std::map<std::string, Sighting>> SeeModels(const std::string& folder) {
  std::error_code error;
  const std::string real_folder = fs::canonical(folder, error).string();
  auto entry = error ? fs::directory_iterator() : fs::directory_iterator(real_folder, error);
  std::map<std::string, Sighting> all;
  while (!error && entry != fs::directory_iterator()) {
    const std::string name = entry->path().filename().string();
    if (name.front() != '.') {
      Sighting sighting = See(*entry, name, real_folder);
      if (sighting.kind != Sighting::kGone) all.emplace(name, std::move(sighting));
    }
    entry.increment(error);
  }
  if (error) return FileError(folder, "cannot be read", error.value());
  return all;
}

}  // namespace layerd
