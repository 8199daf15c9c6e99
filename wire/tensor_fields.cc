#include "wire/tensor_fields.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "layerd/v1/layer_service.pb.h"
#include "wire/message_routes.h"

namespace layerd::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The kinds of value in protobuf's wire format that are in use.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void PutVarint(uint64_t value, std::string& to) {
  for (; value >= 0x80; value >>= 7) to.push_back(static_cast<char>(value | 0x80));
  to.push_back(static_cast<char>(value));
}

void PutHead(uint32_t number, uint64_t length, std::string& to) {
  PutVarint(uint64_t{number} << 3 | kBytes, to);
  PutVarint(length, to);
}

// Reads bytes that lie in pieces. False where there are not so many, or no legal number.
class Reader {
 public:
  explicit Reader(const Pieces& pieces) : pieces_(pieces) { SkipEmpty(); }

  size_t position() const { return position_; }

  bool Varint(uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (piece_ == pieces_.size()) return false;
      const auto byte = static_cast<uint64_t>(pieces_[piece_][offset_]);
      Advance(1);
      if (shift == 63 && byte > 1) return false;
      value |= (byte & 0x7F) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool Copy(uint64_t count, std::string& to) {
    return Walk(count, [&](absl::Span<const std::byte> part) {
      to.append(reinterpret_cast<const char*>(part.data()), part.size());
    });
  }
  bool Take(uint64_t count, Pieces& to) {
    return Walk(count, [&](absl::Span<const std::byte> part) { to.push_back(part); });
  }

 private:
  template <typename Visit>
  bool Walk(uint64_t count, const Visit& visit) {
    while (count > 0) {
      if (piece_ == pieces_.size()) return false;
      const size_t part = static_cast<size_t>(std::min<uint64_t>(count, pieces_[piece_].size() - offset_));
      visit(pieces_[piece_].subspan(offset_, part));
      Advance(part);
      count -= part;
    }
    return true;
  }
  // `count` bytes further within the piece.
  void Advance(size_t count) {
    offset_ += count;
    position_ += count;
    SkipEmpty();
  }
  void SkipEmpty() {
    while (piece_ < pieces_.size() && offset_ == pieces_[piece_].size()) {
      ++piece_;
      offset_ = 0;
    }
  }

  const Pieces& pieces_;
  size_t piece_ = 0;
  size_t offset_ = 0;  // in the piece
  size_t position_ = 0;
};

// The field `number` of `type`, if it is one message with tensors in it; null otherwise.
const FieldDescriptor* HolderAt(const Descriptor& type, uint64_t number) {
  static const auto* const routes =
      new MessageRoutes(*v1::NormalizeRequest::descriptor()->file(), *v1::Tensor::descriptor());
  for (const FieldDescriptor* field : routes->From(type)) {
    if (static_cast<uint64_t>(field->number()) == number) return field;
  }
  return nullptr;
}

// Goes through the fields of a message.
struct Field {
  uint64_t tag;
  uint64_t number() const { return tag >> 3; }
  uint64_t length;  // of kBytes, whose value comes next
};

// Reads a field of the message that ends at `end`, and appends all of it to `rest` but the value of kBytes, and head of
// that. False where the bytes are not well-formed, or have groups.
bool NextField(Reader& in, size_t end, Field& field, std::string& rest) {
  if (!in.Varint(field.tag) || field.tag > std::numeric_limits<uint32_t>::max() || field.number() == 0) return false;
  field.length = 0;
  const auto copy = [&](uint64_t count) {
    PutVarint(field.tag, rest);
    return in.Copy(count, rest);
  };
  switch (field.tag & 7) {
    case kVarint: {
      uint64_t value;
      if (!in.Varint(value)) return false;
      PutVarint(field.tag, rest);
      PutVarint(value, rest);
      return in.position() <= end;
    }
    case kFixed64:
      return copy(8) && in.position() <= end;
    case kFixed32:
      return copy(4) && in.position() <= end;
    case kBytes:
      return in.Varint(field.length) && in.position() <= end && field.length <= end - in.position();
    default:
      return false;
  }
}

class Separator {
 public:
  explicit Separator(const Pieces& pieces) : in_(pieces) {}

  bool Run(const Descriptor& type, size_t end, std::string& rest) {
    while (in_.position() < end) {
      Field field;
      if (rest.size() > kMostRest || !NextField(in_, end, field, rest)) return false;
      if ((field.tag & 7) != kBytes) continue;
      const auto number = static_cast<uint32_t>(field.number());
      if (const FieldDescriptor* holder = HolderAt(type, number)) {
        std::string inner;
        path_.push_back(holder);
        if (!Run(*holder->message_type(), in_.position() + field.length, inner)) return false;
        path_.pop_back();
        PutHead(number, inner.size(), rest);
        rest += inner;
        continue;
      }
      const bool elements = &type == v1::Tensor::descriptor() && number == v1::Tensor::kDataFieldNumber;
      if (elements) Forget();  // the last one counts
      if (elements && field.length >= kApartBytes) {
        found_.push_back({path_, {}});
        if (!in_.Take(field.length, found_.back().pieces)) return false;
        PutHead(number, 0, rest);
      } else {
        PutHead(number, field.length, rest);
        if (field.length > kMostRest || !in_.Copy(field.length, rest)) return false;
      }
    }
    return in_.position() == end;
  }

  decltype(Separated::elements) found() && { return std::move(found_); }

 private:
  // What was found at this path before.
  void Forget() {
    found_.erase(std::remove_if(found_.begin(), found_.end(), [this](const auto& one) { return one.path == path_; }),
                 found_.end());
  }

  Reader in_;
  Path path_;
  decltype(Separated::elements) found_;
};

// Appends the message `of`, whose bytes without elements are `in` up to `end`.
void AddJoined(Reader& in, size_t end, const Message& of, const SentStorage& storage, Joined& to) {
  const Descriptor& type = *of.GetDescriptor();
  while (in.position() < end) {
    Field field;
    if (!NextField(in, end, field, to.bytes)) break;  // cannot be: protobuf has just written it
    if ((field.tag & 7) != kBytes) continue;
    const auto number = static_cast<uint32_t>(field.number());
    if (const FieldDescriptor* holder = HolderAt(type, number)) {
      const Message& inner = of.GetReflection()->GetMessage(of, holder);
      Joined joined;
      AddJoined(in, in.position() + field.length, inner, storage, joined);
      PutHead(number, joined.size(), to.bytes);
      for (const auto& [at, tensor] : joined.elements) to.elements.push_back({to.bytes.size() + at, tensor});
      to.bytes += joined.bytes;
    } else {
      PutHead(number, field.length, to.bytes);
      in.Copy(field.length, to.bytes);
    }
  }
  if (&type == v1::Tensor::descriptor()) {
    if (const Tensor* tensor = storage.Find(static_cast<const v1::Tensor&>(of))) {
      PutHead(v1::Tensor::kDataFieldNumber, tensor->num_bytes(), to.bytes);
      to.elements.push_back({to.bytes.size(), tensor});
    }
  }
}

}  // namespace

std::optional<Separated> Separate(const Descriptor& type, const Pieces& pieces) {
  size_t size = 0;
  for (const auto& piece : pieces) size += piece.size();
  Separated separated;
  Separator separator(pieces);
  if (!separator.Run(type, size, separated.rest)) return std::nullopt;
  separated.elements = std::move(separator).found();
  return separated;
}

const v1::Tensor& TensorAt(const Message& message, const Path& path) {
  const Message* at = &message;
  for (const FieldDescriptor* field : path) at = &at->GetReflection()->GetMessage(*at, field);
  return static_cast<const v1::Tensor&>(*at);
}

size_t Joined::size() const {
  size_t all = bytes.size();
  for (const Elements& one : elements) all += one.tensor->num_bytes();
  return all;
}

Joined Join(const Message& message, const SentStorage& storage) {
  const std::string rest = message.SerializeAsString();
  const Pieces pieces = {{reinterpret_cast<const std::byte*>(rest.data()), rest.size()}};
  Reader in(pieces);
  Joined joined;
  AddJoined(in, rest.size(), message, storage, joined);
  return joined;
}

}  // namespace layerd::wire
