// Resident layers as layerctl prints them.
//
// JSON has the names of proto/layerd/v1's fields, in their order, and the names of lib/weights/spec_names.h as values.
// Threads: pure functions.
#ifndef LAYERD_CLIENT_LAYER_TEXT_H_
#define LAYERD_CLIENT_LAYER_TEXT_H_

#include <string>
#include <vector>

#include "lib/resident/layer_library.h"
#include "nlohmann/json.hpp"

namespace layerd {

using OrderedJson = nlohmann::ordered_json;

// The message Layer. What is not set there is left out, but for numbers and truth values.
OrderedJson LayerToJson(const LayerListing& listing);

// The message Quantization.
OrderedJson QuantizationInOrder(const Quantization& quantization);
// The same for people, a line for each error; nothing where the layer has none.
std::string QuantizationText(const Layer& layer);

// One line of JSON. Bytes that are not UTF-8 are replaced.
std::string JsonLine(const OrderedJson& json);

// "usable", "prepared", "pinned", "pinned, not prepared", "unusable: LAYER_DAMAGED"; ", warning" behind it where there is
// one.
std::string StateText(const LayerListing& listing);

// A line for each layer, under a heading, in columns as wide as they need: name, kind, dim, hidden, dtype, size, state.
std::string LayerTable(const std::vector<LayerListing>& layers);

// All that is known of a layer.
std::string LayerDescription(const LayerListing& listing);

}  // namespace layerd

#endif  // LAYERD_CLIENT_LAYER_TEXT_H_
