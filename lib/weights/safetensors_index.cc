#include "lib/weights/safetensors_index.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/weights/checkpoint_folder.h"
#include "lib/weights/file_io.h"
#include "nlohmann/json.hpp"

namespace layerd {
namespace {

constexpr char kWeightMap[] = "weight_map";

// Builds a SafetensorsIndex from nlohmann's events: an index names some hundred thousand tensors, and a tree of its JSON
// would take many times its size. Every method returns false to stop; status() then says why.
class IndexHandler {
 public:
  explicit IndexHandler(std::string_view source) : source_(source) {}

  const absl::Status& status() const { return status_; }
  SafetensorsIndex& index() { return index_; }
  bool has_map() const { return has_map_; }

  bool start_object(size_t) {
    if (depth_ == 0 || IsSkipped() || (depth_ == 1 && in_map_)) return Deeper();
    return Unexpected("an object");
  }
  bool end_object() {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(size_t) { return IsSkipped() ? Deeper() : Unexpected("a list"); }
  bool end_array() {
    --depth_;
    return true;
  }

  bool key(std::string& key) {
    if (depth_ == 1) {
      in_map_ = key == kWeightMap;
      if (in_map_ && std::exchange(has_map_, true)) return Fail("the key \"weight_map\" stands there twice");
    } else if (depth_ == 2 && in_map_) {
      if (index_.tensors.count(key) > 0) return Fail(absl::StrCat("weight_map has the tensor ", Quoted(key), " twice"));
      tensor_ = std::move(key);
    }
    return true;
  }

  bool string(std::string& value) {
    if (depth_ != 2 || !in_map_) return IsSkipped() || Unexpected("a string");
    if (!IsSafetensorsName(value)) {
      return Fail(absl::StrCat("weight_map: tensor ", Quoted(tensor_),
                               ": expected the name of a .safetensors file in the same folder, got ", Quoted(value)));
    }
    auto [place, is_new] = places_.emplace(std::move(value), index_.files.size());
    if (is_new) {
      if (index_.files.size() == kMaxSafetensorsFiles) {
        return Fail(absl::StrCat("weight_map: expected at most ", kMaxSafetensorsFiles, " files"));
      }
      index_.files.push_back(place->first);
    }
    index_.tensors.emplace(std::move(tensor_), place->second);
    return true;
  }

  bool number_integer(int64_t) { return IsSkipped() || Unexpected("a number"); }
  bool number_unsigned(uint64_t) { return IsSkipped() || Unexpected("a number"); }
  bool number_float(double, const std::string&) { return IsSkipped() || Unexpected("a number"); }
  bool boolean(bool) { return IsSkipped() || Unexpected("true or false"); }
  bool null() { return IsSkipped() || Unexpected("null"); }
  bool binary(std::vector<uint8_t>&) { return Unexpected("bytes"); }
  bool parse_error(size_t position, const std::string& last_token, const nlohmann::detail::exception&) {
    return Fail(absl::StrCat("the text is not JSON: at its byte ", position, ", near ", Quoted(last_token)));
  }

 private:
  bool Deeper() {
    ++depth_;
    return true;
  }
  // Inside the object, and neither weight_map nor in it.
  bool IsSkipped() const { return depth_ >= 1 && !in_map_; }

  bool Fail(const std::string& text) {
    status_ = InvalidField("file", "CHECKPOINT_INDEX", absl::StrCat(std::string(source_), ": ", text));
    return false;
  }
  bool Unexpected(const std::string& got) {
    if (depth_ == 0) return Fail(absl::StrCat("expected an object, got ", got));
    if (depth_ == 1) return Fail(absl::StrCat("weight_map: expected an object, got ", got));
    return Fail(absl::StrCat("weight_map: tensor ", Quoted(tensor_), ": expected the name of a file, got ", got));
  }

  const std::string_view source_;
  absl::Status status_;
  SafetensorsIndex index_;
  std::map<std::string, size_t> places_;
  int64_t depth_ = 0;
  bool in_map_ = false;  // at weight_map's value, or in it
  bool has_map_ = false;
  std::string tensor_;
};

}  // namespace

absl::StatusOr<SafetensorsIndex> ParseSafetensorsIndex(std::string_view json, std::string_view source) {
  IndexHandler handler(source);
  // nlohmann takes a NUL for the end of the input and would not look at what follows.
  const bool parsed =
      json.find('\0') == std::string_view::npos && nlohmann::json::sax_parse(json.begin(), json.end(), &handler);
  if (!handler.status().ok()) return handler.status();
  if (!parsed || !handler.has_map()) {
    return InvalidField(
        "file", "CHECKPOINT_INDEX",
        absl::StrCat(std::string(source), parsed ? ": no weight_map" : ": the text is not JSON: a NUL"));
  }
  return std::move(handler.index());
}

}  // namespace layerd
