#include "wire/message_routes.h"

#include <utility>

namespace layerd::wire {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

MessageRoutes::MessageRoutes(const google::protobuf::FileDescriptor& file, const Descriptor& to) {
  for (int i = 0; i < file.message_type_count(); ++i) Add(*file.message_type(i), to);
}

// Whether there is a way; adds all that begin at `from`. No message of ours is in itself.
bool MessageRoutes::Add(const Descriptor& from, const Descriptor& to) {
  if (&from == &to) return true;
  Fields fields;
  for (int i = 0; i < from.field_count(); ++i) {
    const FieldDescriptor& field = *from.field(i);
    if (field.message_type() == nullptr || field.is_repeated()) continue;
    if (Add(*field.message_type(), to)) fields.push_back(&field);
  }
  if (fields.empty()) return false;
  fields_[&from] = std::move(fields);
  return true;
}

const MessageRoutes::Fields& MessageRoutes::From(const Descriptor& from) const {
  static const auto* const none = new Fields;
  const auto found = fields_.find(&from);
  return found == fields_.end() ? *none : found->second;
}

}  // namespace layerd::wire
