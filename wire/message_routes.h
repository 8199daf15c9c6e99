// The ways from the messages of a call to those in it.
#ifndef LAYERD_WIRE_MESSAGE_ROUTES_H_
#define LAYERD_WIRE_MESSAGE_ROUTES_H_

#include <google/protobuf/descriptor.h>

#include <map>
#include <vector>

namespace layerd::wire {

// Which fields lead, at any depth, to messages of one type. Fields that are repeated are not followed.
// Threads: const access from any.
class MessageRoutes {
 public:
  using Fields = std::vector<const google::protobuf::FieldDescriptor*>;

  // From the messages of `file` to those of type `to`.
  MessageRoutes(const google::protobuf::FileDescriptor& file, const google::protobuf::Descriptor& to);

  // The fields of `from` that do; none for `to` itself.
  const Fields& From(const google::protobuf::Descriptor& from) const;

 private:
  bool Add(const google::protobuf::Descriptor& from, const google::protobuf::Descriptor& to);

  std::map<const google::protobuf::Descriptor*, Fields> fields_;
};

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_MESSAGE_ROUTES_H_
