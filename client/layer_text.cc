#include "client/layer_text.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/progress.h"
#include "lib/base/dtype.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"
#include "lib/weights/checkpoint.h"
#include "lib/weights/spec_json.h"
#include "lib/weights/spec_names.h"

namespace layerd {
namespace {

std::string TimeStampText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E*SZ", time, absl::UTCTimeZone());
}

std::string KindText(const Layer& layer) {
  if (const auto* norm = std::get_if<NormalizeLayer>(&layer)) return NameIn(kNormKindNames, norm->spec.kind);
  const FeedForwardSpec& spec = std::get<FeedForwardLayer>(layer).spec;
  return absl::StrCat(NameIn(kFeedForwardFormNames, spec.form), " ", NameIn(kActivationNames, spec.activation.kind));
}

// The dtypes of the weights: "bfloat16", "bfloat16+float32". Scales belong to their matrices.
std::string DTypesText(const Layer& layer) {
  std::set<std::string> names;
  for (const auto& [role, tensor] : WeightsOf(layer)) {
    if (!IsScale(role)) names.emplace(Name(tensor.dtype()));
  }
  return absl::StrJoin(names, "+");
}

// What the tensor of `role` is called in the layer's file.
std::string TensorNameOf(const LayerInfo& info, std::string_view role) {
  const auto found = info.tensors.find(std::string(role));
  return found == info.tensors.end() ? std::string(role) : found->second;
}

// Null where there is none.
const Quantization* QuantizationOf(const Layer& layer) {
  const auto* feed_forward = std::get_if<FeedForwardLayer>(&layer);
  return feed_forward != nullptr && feed_forward->quantization ? &*feed_forward->quantization : nullptr;
}

std::string Figure(double value) { return absl::StrFormat("%.3g", value); }

using Row = std::vector<std::string>;

// Names in files may have anything in them, and a terminal obeys control characters.
void AppendPrintable(std::string& to, std::string_view text) {
  for (const char c : text) to += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
}

// Rows in columns as wide as they need, two spaces apart; `indent` goes before each line.
std::string Columns(const std::vector<Row>& rows, std::string_view indent) {
  std::vector<size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line(indent);
    for (size_t i = 0; i < row.size(); ++i) {
      AppendPrintable(line, row[i]);
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size() + 2, ' ');
    }
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

std::string SpecValueText(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void AppendSection(std::string& text, const char* heading, const std::vector<Row>& rows) {
  if (!rows.empty()) absl::StrAppend(&text, heading, "\n", Columns(rows, "  "));
}

}  // namespace

OrderedJson LayerToJson(const LayerListing& listing) {
  const LayerInfo& info = listing.info;
  OrderedJson json = {{"name", info.name}};
  if (info.status.ok()) {
    json.update(OrderedJson(SpecToJson(info.outline)));
    json["weights"] = OrderedJson::array();
    for (const auto& [role, tensor] : WeightsOf(info.outline)) {
      json["weights"].push_back({{"role", std::string(role)},
                                 {"dtype", std::string(Name(tensor.dtype()))},
                                 {"shape", tensor.shape()},
                                 {"tensor", TensorNameOf(info, role)}});
    }
    json["dim"] = info.extent.dim;
    json["hidden_dim"] = info.extent.hidden_dim;
    json["out_dim"] = info.extent.out_dim;
    json["parameters"] = info.extent.parameters;
    json["weight_bytes"] = info.extent.weight_bytes;
  }
  if (!info.content_hash.empty()) json["content_hash"] = info.content_hash;
  if (info.uploaded) json["etag"] = info.content_hash;
  json["source"] = info.uploaded ? "upload" : "checkpoint";
  if (info.create_time != absl::InfinitePast()) json["create_time"] = TimeStampText(info.create_time);
  if (!info.weights_sha256.empty()) json["sha256"] = info.weights_sha256;
  for (const Inference& inference : info.inferred) {
    json["inferences"].push_back(
        {{"option", inference.option}, {"value", inference.value}, {"source", inference.source}});
  }
  if (!info.status.ok()) {
    json["problem"] = {{"reason", DetailsOf(info.status).reason}, {"message", std::string(info.status.message())}};
  }
  json["prepared"] = listing.prepared;
  json["pinned"] = listing.pinned;
  if (!listing.warning.empty()) json["warning"] = listing.warning;
  if (const Quantization* quantization = QuantizationOf(info.outline)) {
    json["quantization"] = QuantizationInOrder(*quantization);
  }
  return json;
}

OrderedJson QuantizationInOrder(const Quantization& quantization) {
  OrderedJson json = {{"source_hash", quantization.source_hash}, {"matrices", OrderedJson::array()}};
  for (const MatrixError& one : quantization.matrices) {
    json["matrices"].push_back(
        {{"role", one.role}, {"relative_rms_error", one.relative_rms_error}, {"max_abs_error", one.max_abs_error}});
  }
  if (quantization.output_relative_rms_error) {
    json["output_relative_rms_error"] = *quantization.output_relative_rms_error;
  }
  json["rows"] = quantization.rows;
  json["seed"] = quantization.seed;
  return json;
}

std::string QuantizationText(const Layer& layer) {
  const Quantization* quantization = QuantizationOf(layer);
  if (quantization == nullptr) return "";
  constexpr char kRelative[] = "relative rms error ";
  std::vector<Row> rows;
  for (const MatrixError& one : quantization->matrices) {
    rows.push_back({absl::StrCat("weights of ", one.role), absl::StrCat(kRelative, Figure(one.relative_rms_error)),
                    absl::StrCat("max abs error ", Figure(one.max_abs_error))});
  }
  const auto& output = quantization->output_relative_rms_error;
  rows.push_back({"output", absl::StrCat(kRelative, output ? Figure(*output) : "unknown: it is not finite"),
                  absl::StrCat("for ", quantization->rows, " rows of seed ", quantization->seed)});
  return Columns(rows, "  ");
}

std::string JsonLine(const OrderedJson& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace) + "\n";
}

std::string StateText(const LayerListing& listing) {
  const char* const warning = listing.warning.empty() ? "" : ", warning";
  if (!listing.info.status.ok()) return absl::StrCat("unusable: ", DetailsOf(listing.info.status).reason, warning);
  const char* const state = listing.pinned     ? listing.prepared ? "pinned" : "pinned, not prepared"
                            : listing.prepared ? "prepared"
                                               : "usable";
  return absl::StrCat(state, warning);
}

std::string LayerTable(const std::vector<LayerListing>& layers) {
  std::vector<Row> rows = {{"name", "kind", "dim", "hidden", "dtype", "size", "state"}};
  for (const LayerListing& listing : layers) {
    const LayerInfo& info = listing.info;
    if (!info.status.ok()) {
      rows.push_back({info.name, "-", "-", "-", "-", "-", StateText(listing)});
      continue;
    }
    const LayerExtent& extent = info.extent;
    rows.push_back({info.name, KindText(info.outline), absl::StrCat(extent.dim),
                    extent.hidden_dim == 0 ? "-" : absl::StrCat(extent.hidden_dim), DTypesText(info.outline),
                    BytesText(static_cast<double>(extent.weight_bytes)), StateText(listing)});
  }
  return Columns(rows, "");
}

std::string LayerDescription(const LayerListing& listing) {
  const LayerInfo& info = listing.info;
  std::string text = absl::StrCat(info.name, "\n");
  std::vector<Row> facts = {{"state", StateText(listing)}, {"source", info.uploaded ? "upload" : "checkpoint"}};
  if (info.status.ok()) {
    absl::StrAppend(&text, Description(info), "\n");
    facts.push_back({"parameters", absl::StrCat(info.extent.parameters)});
    facts.push_back({"weight_bytes", absl::StrCat(info.extent.weight_bytes)});
  }
  const std::string created = info.create_time == absl::InfinitePast() ? "" : TimeStampText(info.create_time);
  const std::string problem = info.status.ok() ? "" : std::string(info.status.message());
  const Quantization* quantization = QuantizationOf(info.outline);
  const std::string source_hash = quantization == nullptr ? "" : quantization->source_hash;
  for (const auto& [name, value] : {std::pair("content_hash", &info.content_hash),
                                    {"quantized_from", &source_hash},
                                    {"sha256", &info.weights_sha256},
                                    {"create_time", &created},
                                    {"warning", &listing.warning},
                                    {"problem", &problem}}) {
    if (!value->empty()) facts.push_back({name, *value});
  }
  text += Columns(facts, "  ");
  if (info.status.ok()) {
    std::vector<Row> options, weights;
    const nlohmann::json spec = SpecToJson(info.outline);
    for (const auto& option : spec.begin()->items()) options.push_back({option.key(), SpecValueText(option.value())});
    AppendSection(text, spec.begin().key() == "normalize" ? "normalize" : "feed_forward", options);
    for (const auto& [role, tensor] : WeightsOf(info.outline)) {
      weights.push_back(
          {std::string(role), std::string(Name(tensor.dtype())), ToString(tensor.shape()), TensorNameOf(info, role)});
    }
    AppendSection(text, "weights", weights);
    if (const std::string errors = QuantizationText(info.outline); !errors.empty()) {
      absl::StrAppend(&text, "quantization\n", errors);
    }
  }
  std::vector<Row> inferred;
  for (const Inference& one : info.inferred) inferred.push_back({one.option, one.value, one.source});
  AppendSection(text, "inferred", inferred);
  return text;
}

}  // namespace layerd
