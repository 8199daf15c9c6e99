#include "lib/weights/tensor_files.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/weights/file_io.h"
#include "lib/weights/safetensors_index.h"

namespace layerd {
namespace {

// Opens `name`; an error is kept in the result.
std::shared_ptr<const TensorFile> OpenShard(const CheckpointFolder& folder, const std::string& name) {
  TensorFile shard{.name = name};
  auto input = folder.OpenFile(name);
  if (input.ok()) {
    auto contents = SafetensorsFile::Open(*std::move(input));
    shard.status = contents.status();
    if (contents.ok()) shard.contents = *std::move(contents);
  } else {
    shard.status = input.status();
  }
  return std::make_shared<const TensorFile>(std::move(shard));
}

absl::Status CheckCount(size_t tensors, size_t max_tensors) {
  if (tensors <= max_tensors) return absl::OkStatus();
  return InvalidField("file", "CHECKPOINT_TENSORS",
                      absl::StrCat("expected at most ", max_tensors, " tensors, got ", tensors));
}

// Adds all tensors of `file` to `tensors`.
absl::Status AddAll(const std::shared_ptr<const TensorFile>& file, size_t max_tensors, TensorMap& tensors) {
  if (!file->status.ok()) return file->status;
  const size_t count = tensors.size() + file->contents->tensors().size();
  if (auto status = CheckCount(count, max_tensors); !status.ok()) return status;
  for (const auto& [name, entry] : file->contents->tensors()) {
    const auto [place, is_new] = tensors.emplace(name, TensorPlace{file, &entry});
    if (is_new) continue;
    return InvalidField("file", "CHECKPOINT_AMBIGUOUS",
                        absl::StrCat("tensor ", Quoted(name), " stands in ", Quoted(place->second.file->name),
                                     " and in ", Quoted(file->name),
                                     ", and there is neither model.safetensors nor an index to tell "
                                     "which is meant"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorMap> OpenIndexed(const CheckpointFolder& folder, const std::string& json, size_t max_tensors) {
  const auto index = ParseSafetensorsIndex(json, Quoted(kIndexFile));
  if (!index.ok()) return index.status();
  if (auto status = CheckCount(index->tensors.size(), max_tensors); !status.ok()) return status;
  std::vector<std::shared_ptr<const TensorFile>> files;
  files.reserve(index->files.size());
  for (const std::string& name : index->files) files.push_back(OpenShard(folder, name));
  TensorMap tensors;
  for (const auto& [name, place] : index->tensors) {
    const std::shared_ptr<const TensorFile>& file = files[place];
    tensors.emplace_hint(tensors.end(), name, TensorPlace{file, file->contents ? file->contents->Find(name) : nullptr});
  }
  return tensors;
}

absl::Status Unusable(std::string_view reason, std::string_view name, const TensorPlace& tensor,
                      const std::string& text) {
  ErrorDetails details;
  details.reason = std::string(reason);
  return WithDetails(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("tensor ", Quoted(name), " in ", Quoted(tensor.file->name), ": ", text), details);
}

}  // namespace

absl::Status CheckUsable(std::string_view name, const TensorPlace& tensor) {
  if (!tensor.file->status.ok()) {
    const absl::string_view text = tensor.file->status.message();
    return Unusable("LAYER_DAMAGED", name, tensor, std::string(absl::StripPrefix(text, "file: ")));
  }
  if (tensor.entry == nullptr) {
    return Unusable("LAYER_DAMAGED", name, tensor, "the index names that file for it, which does not have it");
  }
  if (!DTypeOfSafetensorsName(tensor.entry->dtype)) {
    return Unusable("LAYER_DTYPE", name, tensor,
                    absl::StrCat("layers use the dtypes F32, F16, BF16 and I8, got ", tensor.entry->dtype));
  }
  if (const auto elements = NumElements(tensor.entry->shape); !elements.ok()) {
    return Unusable("LAYER_DAMAGED", name, tensor, absl::StrCat("shape: ", std::string(elements.status().message())));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorMap> OpenTensorFiles(const CheckpointFolder& folder, size_t max_tensors) {
  TensorMap tensors;
  // Transformers looks in this order too.
  const auto single = OpenShard(folder, kWeightsFile);
  if (single->status.code() != absl::StatusCode::kNotFound) {
    if (auto status = AddAll(single, max_tensors, tensors); !status.ok()) return status;
    return tensors;
  }
  const auto index = folder.ReadText(kIndexFile, kMaxSafetensorsIndexBytes, "CHECKPOINT_INDEX");
  if (!index.ok()) return index.status();
  if (*index) return OpenIndexed(folder, **index, max_tensors);

  const auto names = folder.SafetensorsNames();
  if (!names.ok()) return names.status();
  if (names->empty()) {
    ErrorDetails details;
    details.reason = "FILE_NOT_FOUND";
    details.field = "file";
    details.resource_type = "file";
    details.resource_name = absl::StrCat(folder.path(), "/", kWeightsFile);
    return WithDetails(
        absl::StatusCode::kNotFound,
        absl::StrCat("file: expected a folder with model.safetensors, its index, or other .safetensors files, got ",
                     Quoted(folder.path())),
        details);
  }
  if (names->size() > kMaxSafetensorsFiles) {
    return InvalidField("file", "CHECKPOINT_FILES",
                        absl::StrCat("expected at most ", kMaxSafetensorsFiles,
                                     " .safetensors files in one folder, got ", names->size()));
  }
  for (const std::string& name : *names) {
    if (auto status = AddAll(OpenShard(folder, name), max_tensors, tensors); !status.ok()) return status;
  }
  return tensors;
}

absl::StatusOr<TensorMap> OpenTensorFile(const std::string& path) {
  auto contents = SafetensorsFile::Open(path);
  if (!contents.ok()) return contents.status();
  TensorMap tensors;
  TensorFile file{.name = BaseName(path), .status = absl::OkStatus(), .contents = *std::move(contents)};
  const auto status = AddAll(std::make_shared<const TensorFile>(std::move(file)), kMaxTensors, tensors);
  if (!status.ok()) return status;
  return tensors;
}

}  // namespace layerd
