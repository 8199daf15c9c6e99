// Takes the elements of large tensors out of a message's bytes, and puts them in again, without a copy of them.
//
// Threads: pure functions.
#ifndef LAYERD_WIRE_TENSOR_FIELDS_H_
#define LAYERD_WIRE_TENSOR_FIELDS_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "wire/message_storage.h"

namespace layerd::wire {

// The bytes of a message without the elements of large tensors.
struct Separated {
  // Parses to the same message, but that those elements are empty.
  std::string rest;
  struct Elements {
    std::vector<const google::protobuf::FieldDescriptor*> path;  // to the tensor
    Pieces pieces;
  };
  std::vector<Elements> elements;
};

// Of the bytes in `pieces`, a message of `type`. Nothing for bytes in which protobuf should look itself: those that are
// malformed, or seem so, and those of which more than kMostRest would have to be copied.
inline constexpr size_t kMostRest = size_t{256} << 10;
std::optional<Separated> Separate(const google::protobuf::Descriptor& type, const Pieces& pieces);

// The tensor at `path` in `message`.
const v1::Tensor& TensorAt(const google::protobuf::Message& message,
                           const std::vector<const google::protobuf::FieldDescriptor*>& path);

// Part of a message's bytes: those in `bytes`, then the elements of `tensor`, unless that is null.
struct Part {
  std::string bytes;
  const Tensor* tensor = nullptr;
};

// The bytes of `message` with the elements in `storage` put in: what protobuf would write if they were in the message.
std::vector<Part> Joined(const google::protobuf::Message& message, const SentStorage& storage);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_TENSOR_FIELDS_H_
