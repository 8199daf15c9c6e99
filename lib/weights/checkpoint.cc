#include "lib/weights/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "lib/base/errors.h"
#include "lib/weights/checkpoint_description.h"
#include "lib/weights/checkpoint_folder.h"
#include "lib/weights/file_io.h"
#include "lib/weights/layer_draft.h"
#include "lib/weights/layer_inference.h"
#include "lib/weights/layer_name.h"
#include "lib/weights/model_config.h"
#include "lib/weights/spec_names.h"
#include "lib/weights/tensor_files.h"

namespace layerd {
namespace {

using TensorsByRole = std::map<std::string, TensorPlace, std::less<>>;

class CheckpointReader : public LayerReader {
 public:
  explicit CheckpointReader(const TensorsByRole& tensors) {
    for (const auto& [role, tensor] : tensors) places_.emplace(role, Place{&tensor});
  }

  absl::Status Next(std::string_view role, absl::Span<std::byte> out) override {
    Place& place = places_.find(role)->second;
    const auto status = place.tensor->file->contents->ReadAt(*place.tensor->entry, place.read_bytes, out);
    place.read_bytes += out.size();
    return status.ok() ? status : Damaged(*place.tensor, absl::StripPrefix(status.message(), "file: "));
  }

  // What was written while it was read would be a mixture of two versions.
  absl::Status Finish() override {
    for (const auto& [role, place] : places_) {
      if (!place.tensor->file->contents->IsUnchanged()) {
        return Damaged(*place.tensor, "the file changed after the checkpoint was opened");
      }
    }
    return absl::OkStatus();
  }

 private:
  struct Place {
    const TensorPlace* tensor;
    uint64_t read_bytes = 0;
  };

  static absl::Status Damaged(const TensorPlace& tensor, absl::string_view text) {
    return UnusableLayer("LAYER_DAMAGED", absl::StrCat(Quoted(tensor.file->name), ": ", text));
  }

  std::map<std::string_view, Place> places_;  // by role
};

// A layer of a checkpoint. Shares the open files with the others.
class CheckpointLayer : public LayerRecord {
 public:
  CheckpointLayer(LayerInfo info, TensorsByRole tensors) : info_(std::move(info)), tensors_(std::move(tensors)) {}

  const LayerInfo& info() const override { return info_; }

  absl::StatusOr<std::unique_ptr<LayerReader>> Open() const override {
    if (!info_.status.ok()) return info_.status;
    return std::make_unique<CheckpointReader>(tensors_);
  }

 private:
  const LayerInfo info_;
  const TensorsByRole tensors_;  // where info().status is OK
};

// What CheckLayer() says of a layer, with the tensor that its field path means.
absl::Status WithTensor(const absl::Status& status, const std::map<std::string, std::string>& tensors) {
  const std::string field = DetailsOf(status).field;
  std::string role(absl::StripPrefix(field, "weights."));
  role.resize(std::min(role.find('.'), role.size()));
  // A dtype that has no place here, or an int8 matrix without scales, is no damage.
  const bool no_scales = IsScale(role) && tensors.count(role) == 0;
  const char* const reason = DetailsOf(status).reason == "DTYPE_MISMATCH" ? "LAYER_DTYPE"
                             : no_scales                                  ? "LAYER_INCOMPLETE"
                                                                          : "LAYER_DAMAGED";
  const auto tensor = tensors.find(no_scales ? std::string(absl::StripSuffix(role, "_scale")) : role);
  return UnusableLayer(
      reason, absl::StrCat(tensor == tensors.end() ? "" : absl::StrCat("tensor ", Quoted(tensor->second), ": "),
                           status.message()));
}

// Looks up the draft's tensors and puts their outlines into info.outline; why that cannot be done.
absl::Status MakeOutline(const LayerDraft& draft, const TensorMap& tensors, LayerInfo& info, TensorsByRole& stored) {
  info.outline = draft.layer;
  for (const auto& [role, name] : draft.tensors) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      return UnusableLayer("LAYER_INCOMPLETE", absl::StrCat("there is no tensor ", Quoted(name)));
    }
    if (auto status = CheckUsable(name, found->second); !status.ok()) return status;
    const SafetensorsEntry& entry = *found->second.entry;
    const Tensor outline = Tensor::WithoutData(*DTypeOfSafetensorsName(entry.dtype), entry.shape);
    if (auto status = SetWeight(info.outline, role, outline); !status.ok()) return status;
    stored.emplace(role, found->second);
  }
  const auto extent = CheckLayer(info.outline);
  if (!extent.ok()) {
    // Options that cannot be are a mistake in the description, not in the tensors.
    if (!draft.entry.empty() && absl::StartsWith(DetailsOf(extent.status()).field, "spec")) return extent.status();
    return WithTensor(extent.status(), draft.tensors);
  }
  info.extent = *extent;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const LayerRecord>> MakeRecord(const std::string& model, const std::string& name,
                                                              LayerDraft draft, const TensorMap& tensors) {
  LayerInfo info;
  info.name = LayerName{model, name}.Full();
  info.status = draft.status;
  TensorsByRole stored;
  if (info.status.ok()) info.status = MakeOutline(draft, tensors, info, stored);
  if (info.status.code() == absl::StatusCode::kInvalidArgument) {
    return WrongDescription(absl::StrCat(draft.entry, ": ", info.status.message()));
  }
  if (!info.status.ok()) {
    info.outline = Layer();
    stored.clear();
  }
  info.tensors = std::move(draft.tensors);
  info.inferred = std::move(draft.inferred);
  return std::make_shared<const CheckpointLayer>(std::move(info), std::move(stored));
}

std::string OwnName(const LayerRecord& layer) { return ParseLayerName(layer.info().name)->layer; }

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& path, const std::string& model,
                                            const CheckpointHints& hints) {
  try {
    return OpenFiles(path, model, hints);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

absl::StatusOr<Checkpoint> Checkpoint::OpenFiles(const std::string& path, const std::string& model,
                                                 const CheckpointHints& hints) {
  struct stat status;
  const bool is_folder = stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  const std::string beside = FolderOf(path);
  const auto folder = CheckpointFolder::Open(is_folder ? path : beside.empty() ? "." : beside);
  if (!folder.ok()) return folder.status();
  const auto tensors = is_folder ? OpenTensorFiles(*folder) : OpenTensorFile(path);
  if (!tensors.ok()) return tensors.status();
  const auto config = ModelConfig::Read(*folder);
  if (!config.ok()) return config.status();
  // A single file may be one of several that layerd.json describes.
  auto described = DescribedLayers(*folder, *tensors, /*may_match_nothing=*/!is_folder);
  if (!described.ok()) return described.status();

  Checkpoint checkpoint;
  checkpoint.source_ = Quoted(BaseName(std::string(absl::StripSuffix(path, "/"))));
  checkpoint.family_ = config->family() != nullptr ? config->family()->model_type
                       : !described->empty()       ? kDescriptionFile
                                                   : "tensor names";
  LayerDrafts drafts = *std::move(described);
  for (auto& [name, draft] : drafts) ApplyHints(hints, draft);
  if (config->family() != nullptr || drafts.empty()) {
    drafts.merge(InferLayers(*tensors, *config, hints));  // keeps what is described
  }
  for (auto& [name, draft] : drafts) {
    auto record = MakeRecord(model, name, std::move(draft), *tensors);
    if (!record.ok()) return record.status();
    checkpoint.layers_.push_back(*std::move(record));
  }
  return checkpoint;
}

absl::StatusOr<std::shared_ptr<const LayerRecord>> Checkpoint::Find(std::string_view layer) const {
  if (!layer.empty() && layer.back() == '.') layer.remove_suffix(1);
  for (const auto& one : layers_) {
    if (OwnName(*one) == layer) return one;
  }
  constexpr size_t kShown = 4;
  std::string names;
  for (size_t i = 0; i < layers_.size() && i < kShown; ++i) {
    absl::StrAppend(&names, i == 0 ? "" : ", ", Quoted(OwnName(*layers_[i])));
  }
  if (layers_.size() > kShown) absl::StrAppend(&names, " and ", layers_.size() - kShown, " more");
  ErrorDetails details;
  details.reason = "NO_SUCH_LAYER";
  details.field = "file";
  details.resource_type = "layer";
  details.resource_name = Shortened(layer);
  return WithDetails(absl::StatusCode::kNotFound,
                     absl::StrCat("file: ", source_, ": there is no layer ", Quoted(layer), "; it has ",
                                  names.empty() ? "none with names that are known" : names),
                     details);
}

absl::StatusOr<std::string> CheckpointFingerprint(const std::string& folder) {
  const auto opened = CheckpointFolder::Open(folder);
  if (!opened.ok()) return opened.status();
  return opened->Fingerprint();
}

namespace {

// "F32" or "BF16, F32".
std::string DTypesOf(const Layer& layer) {
  std::set<std::string> names;
  for (const auto& [role, tensor] : WeightsOf(layer)) {
    if (!IsScale(role)) names.insert(SafetensorsName(tensor.dtype()));
  }
  std::string text;
  for (const std::string& name : names) absl::StrAppend(&text, text.empty() ? "" : ", ", name);
  return text;
}

std::string OptionsOf(const NormalizeLayer& layer) {
  const NormalizeSpec& spec = layer.spec;
  std::string text = absl::StrCat(NameIn(kNormKindNames, spec.kind), layer.weights.beta ? ", bias" : "");
  absl::StrAppend(&text, "; eps ", ShownNumber(EpsilonOf(spec)), "; ", NameIn(kNormRoundingNames, spec.rounding));
  if (spec.gamma_offset != 0) absl::StrAppend(&text, "; gamma + ", spec.gamma_offset);
  if (spec.group_size != 0) absl::StrAppend(&text, "; groups of ", spec.group_size);
  if (spec.gate_position != GatePosition::kNone) {
    absl::StrAppend(&text, "; gate ", NameIn(kGatePositionNames, spec.gate_position));
  }
  return text;
}

std::string OptionsOf(const FeedForwardLayer& layer) {
  const FeedForwardSpec& spec = layer.spec;
  const FeedForwardWeights& weights = layer.weights;
  const bool out_in = spec.layout == WeightLayout::kOutIn;
  std::string text = absl::StrCat(NameIn(kFeedForwardFormNames, spec.form), ": ",
                                  spec.form == FeedForwardForm::kPlain       ? "up"
                                  : spec.packing == GateUpPacking::kSeparate ? "gate, up"
                                                                             : "gate_up in ");
  if (spec.form == FeedForwardForm::kGated && spec.packing != GateUpPacking::kSeparate) {
    absl::StrAppend(&text, spec.packing == GateUpPacking::kHalves ? "halves" : "turns");
  }
  absl::StrAppend(&text, ", down ", out_in ? "[out, in]" : "[in, out]");
  const bool biases = weights.gate_bias || weights.up_bias || weights.gate_up_bias || weights.down_bias;
  absl::StrAppend(&text, biases ? ", biases" : "", spec.inner_norm ? ", inner norm" : "", "; ",
                  NameIn(kActivationNames, spec.activation.kind));
  if (spec.activation.beta != 1) absl::StrAppend(&text, " with beta ", spec.activation.beta);
  if (spec.gate_max) absl::StrAppend(&text, "; gate at most ", *spec.gate_max);
  if (spec.up_limit) absl::StrAppend(&text, "; up within ", *spec.up_limit);
  if (spec.up_offset != 0) absl::StrAppend(&text, "; up + ", spec.up_offset);
  return text;
}

}  // namespace

std::string Description(const LayerInfo& info) {
  if (!info.status.ok()) return absl::StrCat("cannot be used: ", info.status.message());
  std::string text = std::visit([](const auto& layer) { return OptionsOf(layer); }, info.outline);
  absl::StrAppend(&text, "; d ", info.extent.dim);
  if (info.extent.hidden_dim != 0) absl::StrAppend(&text, ", h ", info.extent.hidden_dim);
  if (info.extent.out_dim != info.extent.dim) absl::StrAppend(&text, ", out ", info.extent.out_dim);
  return absl::StrCat(text, "; ", DTypesOf(info.outline));
}

}  // namespace layerd
