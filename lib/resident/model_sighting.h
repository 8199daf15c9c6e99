// What a look at a folder of models sees, before anything is read.
#ifndef LAYERD_LIB_RESIDENT_MODEL_SIGHTING_H_
#define LAYERD_LIB_RESIDENT_MODEL_SIGHTING_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace layerd {

// What stands under a name.
struct Sighting {
  enum Kind : uint8_t {
    kGone,        // nothing, or no folder
    kNoModel,     // a folder without a checkpoint
    kForbidden,   // what may be no model: `status`
    kUnreadable,  // a folder that cannot be examined: `status`
    kFiles,       // a checkpoint, with this fingerprint
  };
  Kind kind = kGone;
  std::string path;  // without links
  std::string fingerprint;
  absl::Status status;

  friend bool operator==(const Sighting& a, const Sighting& b) {
    return a.kind == b.kind && a.path == b.path && a.fingerprint == b.fingerprint && a.status == b.status;
  }
};

// What stands under each name in `folder` that begins with no dot; what is no folder is left out. Links are followed to
// folders inside `folder` only. Errors are those of lib/weights/file_io.h, for `folder` itself. Threads: any.
absl::StatusOr<std::map<std::string, Sighting>> SeeModels(const std::string& folder);

// FAILED_PRECONDITION, reason NO_MODEL.
absl::Status NoModel(std::string_view text);

// `status` with the model's name in place of its path: where the models lie is nothing for callers from outside.
absl::Status WithoutPath(const absl::Status& status, const std::string& path, const std::string& model);

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_MODEL_SIGHTING_H_
