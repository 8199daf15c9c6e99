// What a layer is, as one number: the content hash, by which a caller knows which layer has answered.
//
// It is the SHA-256, in lower-case hexadecimal, of a text of ASCII lines, each ended by a newline:
//
//   layerd layer 1
//   normalize kind=rms_norm epsilon=3ee4f8b588e368f1 rounding=before_gamma gamma_offset=0000000000000000 …
//   gamma F32 [64] <SHA-256 of the tensor's bytes, little-endian, row-major>
//
// (docs/layers_on_the_server.md has it in full.) Defaults are filled in, numbers are the bits of a float64, big-endian,
// in hexadecimal, and weights stand in the order of their roles (lib/layers/layer.h). So the same layer has the same
// hash whether it was loaded from a checkpoint or uploaded, however its file was laid out, and anyone can compute it.
//
// Threads: pure functions; Sha256 belongs to one thread at a time.
#ifndef LAYERD_LIB_WEIGHTS_LAYER_HASH_H_
#define LAYERD_LIB_WEIGHTS_LAYER_HASH_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "lib/layers/layer.h"

namespace layerd {

// SHA-256 of bytes that come in pieces.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void Update(absl::Span<const std::byte> bytes);
  // In lower-case hexadecimal, 64 characters. Afterwards the object can only be destroyed or assigned to.
  std::string Finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string Sha256Of(absl::Span<const std::byte> bytes);

// Whether `text` is a SHA-256 as Finish() gives it.
bool IsSha256(std::string_view text);

// The text above; `tensor_hash` gives the SHA-256 of a role's data. `layer` may be an outline.
std::string CanonicalText(const Layer& layer, absl::FunctionRef<std::string(std::string_view role)> tensor_hash);

// The content hash, from the SHA-256 of each weight's data by role: all that `layer`, which may be an outline, has.
std::string ContentHash(const Layer& layer, const std::map<std::string, std::string, std::less<>>& tensor_hashes);
// The content hash of a layer that is no outline. Hashes about 1 GB/s.
std::string ContentHash(const Layer& layer);

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_LAYER_HASH_H_
