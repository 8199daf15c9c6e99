// Where the elements of a message's tensors are: in the message, or apart from it.
//
// protobuf copies a field of bytes, in and out, and so a large tensor costs more to copy than to normalise. On the wire
// nothing differs; but a large tensor's elements stay where gRPC put them, or go out from where they were computed, and
// the message that protobuf sees has that field empty. Or they lie in memory that both sides share, and the message says
// where.
#ifndef LAYERD_WIRE_MESSAGE_STORAGE_H_
#define LAYERD_WIRE_MESSAGE_STORAGE_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "layerd/v1/tensor.pb.h"
#include "lib/base/memory_place.h"
#include "lib/base/tensor.h"

namespace layerd::wire {

// Elements of so many bytes or more are kept apart; to copy fewer is cheaper.
inline constexpr size_t kApartBytes = 8192;

// Pieces of memory that follow one another.
using Pieces = absl::InlinedVector<absl::Span<const std::byte>, 4>;

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

  // The memory that `reference`, which is part of the message, refers to.
  void AddShared(const v1::SharedMemory& reference, MemoryPlace place) {
    shared_.emplace_back(&reference, std::move(place));
  }
  // Null where nothing was said of it.
  const MemoryPlace* FindShared(const v1::SharedMemory& reference) const {
    for (const auto& [of, place] : shared_) {
      if (of == &reference) return &place;
    }
    return nullptr;
  }

 private:
  std::shared_ptr<const void> message_;
  std::vector<Apart> apart_;
  std::vector<std::pair<const v1::SharedMemory*, MemoryPlace>> shared_;
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

  // Memory that the receiver has too, to whose beginning `reference` refers. What lies in it need not be sent.
  void AddShared(absl::Span<const std::byte> memory, v1::SharedMemory reference) {
    shared_.emplace_back(memory, std::move(reference));
  }
  // Nothing where the receiver does not have all of `memory`, or a reference would not be legal.
  std::optional<v1::SharedMemory> ReferenceTo(absl::Span<const std::byte> memory) const;

 private:
  absl::InlinedVector<std::pair<const v1::Tensor*, Tensor>, 1> apart_;
  std::vector<std::pair<absl::Span<const std::byte>, v1::SharedMemory>> shared_;
};

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_MESSAGE_STORAGE_H_
