// Where the elements of a message's tensors are: in the message, or apart from it.
//
// protobuf copies a field of bytes, in and out, and so a large tensor costs more to copy than to normalise. On the wire
// nothing differs; but a large tensor's elements stay where gRPC put them, or go out from where they were computed, and
// the message that protobuf sees has that field empty.
#ifndef LAYERD_WIRE_MESSAGE_STORAGE_H_
#define LAYERD_WIRE_MESSAGE_STORAGE_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "layerd/v1/tensor.pb.h"
#include "lib/base/tensor.h"

namespace layerd::wire {

// Elements of so many bytes or more are kept apart; to copy fewer is cheaper.
inline constexpr size_t kApartBytes = 8192;

// Pieces of memory that follow one another.
using Pieces = std::vector<absl::Span<const std::byte>>;

// Of a message that was received. Copies share. Threads: const access from any.
class ReceivedStorage {
 public:
  // All elements are in the message, which `message` keeps alive.
  explicit ReceivedStorage(std::shared_ptr<const void> message) : message_(std::move(message)) {}

  // The elements of one tensor, in memory that `owner` keeps alive.
  struct Apart {
    const v1::Tensor* tensor;
    Pieces elements;
    std::shared_ptr<const void> owner;
  };
  // Those of some tensors are apart.
  ReceivedStorage(std::shared_ptr<const void> message, std::vector<Apart> apart)
      : message_(std::move(message)), apart_(std::move(apart)) {}

  const std::shared_ptr<const void>& message() const { return message_; }
  // Null where the elements of `tensor` are in the message.
  const Apart* Find(const v1::Tensor& tensor) const {
    for (const Apart& one : apart_) {
      if (one.tensor == &tensor) return &one;
    }
    return nullptr;
  }

 private:
  std::shared_ptr<const void> message_;
  std::vector<Apart> apart_;
};

// Of a message that is to be sent: the tensors that were left out of it. Threads: one at a time.
class SentStorage {
 public:
  void Add(const v1::Tensor& message, Tensor tensor) { apart_.emplace_back(&message, std::move(tensor)); }
  // Null where the elements are in the message.
  const Tensor* Find(const v1::Tensor& message) const {
    for (const auto& [of, tensor] : apart_) {
      if (of == &message) return &tensor;
    }
    return nullptr;
  }
  bool empty() const { return apart_.empty(); }

 private:
  std::vector<std::pair<const v1::Tensor*, Tensor>> apart_;
};

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_MESSAGE_STORAGE_H_
