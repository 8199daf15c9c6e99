// A checkpoint's config.json, as far as layers need it.
//
// A multimodal model has its language model's keys in "text_config": where the family is found there, that object is
// looked at first and the outer one second; otherwise it is the other way round. A key whose value is null is not there.
#ifndef LAYERD_LIB_WEIGHTS_MODEL_CONFIG_H_
#define LAYERD_LIB_WEIGHTS_MODEL_CONFIG_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "lib/kernels/activation.h"
#include "lib/weights/checkpoint_folder.h"
#include "lib/weights/families.h"
#include "nlohmann/json.hpp"

namespace layerd {

// A value, and where it stands: "config.json: rms_norm_eps".
template <typename T>
struct Sourced {
  T value;
  std::string source;
};

// The shortest text that gives `value` again: "1e-05".
inline std::string ShownNumber(double value) { return nlohmann::json(value).dump(); }

// Threads: const methods from any number of threads.
class ModelConfig {
 public:
  // The folder's config.json, or an empty one. INVALID_ARGUMENT, field "file", reason CHECKPOINT_CONFIG, where it is no
  // JSON object; the errors of CheckpointFolder.
  static absl::StatusOr<ModelConfig> Read(const CheckpointFolder& folder);

  // Null where model_type names none that is known.
  const Family* family() const { return family_; }
  // Whether it describes one model only. Beside others, such as a vision model, its outer keys tell nothing of layers
  // that belong to no known family.
  bool describes_one_model() const;

  // The first that is there of `keys`, which are separated by spaces; nothing where none is. INVALID_ARGUMENT, naming the
  // key, where its value is no epsilon, or no activation that is known.
  absl::StatusOr<std::optional<Sourced<double>>> Epsilon(std::string_view keys) const;
  absl::StatusOr<std::optional<Sourced<Activation>>> ActivationOf(std::string_view keys) const;

 private:
  std::optional<Sourced<nlohmann::json>> Find(std::string_view keys) const;

  nlohmann::json top_ = nlohmann::json::object();
  nlohmann::json text_;  // null where there is none
  bool family_is_texts_ = false;
  const Family* family_ = nullptr;
};

}  // namespace layerd

#endif  // LAYERD_LIB_WEIGHTS_MODEL_CONFIG_H_
