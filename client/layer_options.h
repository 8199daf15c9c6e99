// The options of layerctl that say what a layer computes: to make a layer of them, to go over those of a file, or to say
// what a layer of the server is expected to have.
//
// Threads: one at a time.
#ifndef LAYERD_CLIENT_LAYER_OPTIONS_H_
#define LAYERD_CLIENT_LAYER_OPTIONS_H_

#include "absl/status/status.h"
#include "lib/engine/layer_engine.h"
#include "lib/weights/checkpoint.h"

namespace CLI {
class App;
}

namespace layerd {

// Adds the options that fill `said`, which must outlive `app`.
void RegisterOptions(CLI::App& app, NormalizeSaid& said);
void RegisterOptions(CLI::App& app, FeedForwardSaid& said);

// Whether any of them was given.
bool AnySaid(const NormalizeSaid& said);
bool AnySaid(const FeedForwardSaid& said);

// Puts what is said over `spec`. INVALID_ARGUMENT, naming the option, for one that such a layer cannot have.
absl::Status PutOver(const NormalizeSaid& said, NormalizeSpec& spec);
absl::Status PutOver(const FeedForwardSaid& said, FeedForwardSpec& spec);

// INVALID_ARGUMENT for an option that a call by name cannot carry: a 0 that means "nothing said" on the wire.
absl::Status CheckSayable(const NormalizeSaid& said);
absl::Status CheckSayable(const FeedForwardSaid& said);

// What of it a checkpoint needs to know, since its files may leave it open.
CheckpointHints HintsOf(const NormalizeSaid& norm, const FeedForwardSaid& feed_forward);

// The error for a missing option: INVALID_ARGUMENT, "--dim: needed, since --seed makes the input".
absl::Status NeedOption(std::string_view option, std::string_view why);

}  // namespace layerd

#endif  // LAYERD_CLIENT_LAYER_OPTIONS_H_
