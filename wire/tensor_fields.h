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

#include "absl/container/inlined_vector.h"
#include "wire/message_storage.h"

namespace layerd::wire {

// From a message to one in it.
using Path = absl::InlinedVector<const google::protobuf::FieldDescriptor*, 4>;

// The bytes of a message without the elements of large tensors.
struct Separated {
  // Parses to the same message, but that those elements are empty.
  std::string rest;
  struct Elements {
    Path path;  // to the tensor
    Pieces pieces;
  };
  absl::InlinedVector<Elements, 2> elements;
};

// Of the bytes in `pieces`, a message of `type`. Nothing for bytes in which protobuf should look itself: those that are
// malformed, or seem so, and those of which more than kMostRest would have to be copied.
inline constexpr size_t kMostRest = size_t{256} << 10;
std::optional<Separated> Separate(const google::protobuf::Descriptor& type, const Pieces& pieces);

// The tensor at `path` in `message`.
const v1::Tensor& TensorAt(const google::protobuf::Message& message, const Path& path);

// A message's bytes but for the elements of tensors.
struct Joined {
  std::string bytes;
  // Those of `tensor` belong between bytes[at − 1] and bytes[at].
  struct Elements {
    size_t at;
    const Tensor* tensor;
  };
  absl::InlinedVector<Elements, 4> elements;  // by `at`

  // Of the whole message.
  size_t size() const;
};

// The bytes of `message` with the elements in `storage` put in: what protobuf would write if they were in the message.
Joined Join(const google::protobuf::Message& message, const SentStorage& storage);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_TENSOR_FIELDS_H_
