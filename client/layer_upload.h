// What `layers upload` and `layers quantize` have in common: layers from files, what is said of them, and their way into the
// server's store.
//
// Threads: one at a time.
#ifndef LAYERD_CLIENT_LAYER_UPLOAD_H_
#define LAYERD_CLIENT_LAYER_UPLOAD_H_

#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/commands.h"
#include "lib/engine/layer_engine.h"
#include "lib/layers/layer.h"

namespace layerd {

struct LayerUploadOptions {
  std::string weights_file, prefix;  // one layer of a checkpoint, or a file of one layer
  std::string checkpoint;            // all of its layers
  NormalizeSaid norm;
  FeedForwardSaid feed_forward;
  UploadOptions upload;
  bool progress = false;

  // Adds the options that fill these, which must outlive `command`. `all` says what happens to a whole checkpoint.
  void Register(CLI::App& command, const std::string& all);
};

// INVALID_ARGUMENT: an option that would be ignored.
absl::Status UnexpectedOption(std::string_view option, std::string_view why);

// `layer` with what is said of it put over its own options, checked.
absl::StatusOr<Layer> WithSaid(const LayerUploadOptions& options, Layer layer);
// The same of --weights and --prefix.
absl::StatusOr<Layer> ReadLayer(const LayerUploadOptions& options);

// Uploads `layer` and prints what has come of it; gives the exit status.
int UploadLayer(const Session& session, const LayerUploadOptions& options, const std::string& name, const Layer& layer);

// Makes another layer of one that was read.
using LayerChange = absl::FunctionRef<absl::StatusOr<Layer>(Layer layer)>;

// Uploads what can be used of --from, as `change` makes it, under the model `name` (models/MODEL); the rest is told on
// standard error. Goes on after a layer that is refused, but not without a connection. Gives the exit status.
int UploadCheckpoint(const Session& session, const LayerUploadOptions& options, const std::string& name,
                     LayerChange change);

}  // namespace layerd

#endif  // LAYERD_CLIENT_LAYER_UPLOAD_H_
