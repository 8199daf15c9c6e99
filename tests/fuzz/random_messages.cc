#include "tests/fuzz/random_messages.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "wire/message_storage.h"

namespace layerd {

int Below(Random& random, int end) { return static_cast<int>(random() % static_cast<uint64_t>(end)); }

std::string RandomBytes(Random& random, size_t count) {
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

namespace {

using wire::kApartBytes;

void FillReference(Random& random, v1::SharedMemory& reference) {
  if (Below(random, 3) != 0) reference.set_region("region");
  if (Below(random, 3) != 0) reference.set_offset(static_cast<int64_t>(random()));
}

void FillTensor(Random& random, v1::Tensor& tensor) {
  if (Below(random, 8) != 0) tensor.set_dtype(static_cast<v1::Dtype>(Below(random, 6)));
  for (int i = Below(random, 4); i > 0; --i) tensor.add_shape(Below(random, 100));
  // The last is more than a message that is copied as a whole has.
  constexpr size_t kSizes[] = {
      0, 1, 100, kApartBytes - 1, kApartBytes, kApartBytes + 1, 3 * kApartBytes, 9 * kApartBytes};
  if (Below(random, 5) != 0) tensor.set_data(RandomBytes(random, kSizes[Below(random, std::size(kSizes))]));
  for (int i = Below(random, 20) == 0 ? 3000 : 0; i > 0; --i) tensor.add_values(1.0f);
  if (Below(random, 4) == 0) FillReference(random, *tensor.mutable_shared_memory());
}

}  // namespace

v1::FeedForwardRequest RandomFeedForward(Random& random) {
  v1::FeedForwardRequest request;
  if (Below(random, 8) != 0) FillTensor(random, *request.mutable_input());
  if (Below(random, 2) == 0) request.mutable_spec()->set_up_offset(1.5);
  if (Below(random, 4) != 0) {
    auto& weights = *request.mutable_weights();
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_gate());
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_up());
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_down());
    if (Below(random, 2) == 0) FillTensor(random, *weights.mutable_down_scale());
  }
  if (Below(random, 2) == 0) request.set_layer("models/m/layers/l");
  request.set_verify(Below(random, 2) == 0);
  if (Below(random, 3) == 0) FillReference(random, *request.mutable_output_memory());
  return request;
}

v1::NormalizeResponse RandomNormalizeResponse(Random& random) {
  v1::NormalizeResponse response;
  FillTensor(random, *response.mutable_output());
  if (Below(random, 2) == 0) FillTensor(random, *response.mutable_residual_sum());
  if (Below(random, 2) == 0) FillTensor(random, *response.mutable_intermediates()->mutable_inverse_rms());
  if (Below(random, 2) == 0) response.mutable_report()->add_stages()->set_stage("norm");
  return response;
}

std::string Mutated(Random& random, std::string bytes, const std::string& other) {
  const auto at = [&] { return bytes.empty() ? 0 : random() % bytes.size(); };
  const auto insert = [&](const std::string& what) { bytes.insert(Below(random, 2) == 0 ? 0 : bytes.size(), what); };
  switch (Below(random, 12)) {
    case 0:
      break;
    case 1:  // merged with another message
      bytes += other;
      break;
    case 2:
      bytes = other + bytes;
      break;
    case 3:
      bytes.resize(at());
      break;
    case 4:
      if (!bytes.empty()) bytes[at()] = static_cast<char>(random());
      break;
    case 5:  // near the beginning, where tags and lengths are
      if (!bytes.empty()) bytes[random() % std::min<size_t>(bytes.size(), 12)] = static_cast<char>(random());
      break;
    case 6:
      bytes.erase(at(), 1 + random() % 3);
      break;
    case 7:
      bytes.insert(at(), RandomBytes(random, 1 + random() % 3));
      break;
    case 8:  // an unknown field of each kind, and an empty group
      insert(std::vector<std::string>{std::string("\x98\x06\x05", 3), std::string("\x99\x06\1\2\3\4\5\6\7\x08", 10),
                                      std::string("\x9A\x06\x02hi", 5), std::string("\x9D\x06\1\2\3\4", 6),
                                      std::string("\x9B\x06\x9C\x06", 4)}[Below(random, 5)]);
      break;
    case 9:  // numbers that are longer than they need be: tag 3·8, wire type 0; a length; ten bytes; eleven
      insert(std::vector<std::string>{
          std::string("\x98\x80\0\1", 4), std::string("\x0A\x80\0", 3),
          std::string("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\1", 11),
          std::string("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F", 11),
          std::string("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\1", 12)}[Below(random, 5)]);
      break;
    case 10:  // field 0, an end of a group alone, a length beyond the end, one beyond 2³¹, the input as a number
      insert(std::vector<std::string>{std::string("\2\0", 2), std::string("\x0C", 1), std::string("\x0A\x7F", 2),
                                      std::string("\x0A\xFF\xFF\xFF\xFF\x0F", 6),
                                      std::string("\x08\1", 2)}[Below(random, 5)]);
      break;
    case 11:  // a name that is not UTF-8
      insert(std::string("\x3A\1\xFF", 3));
      break;
  }
  return bytes;
}

}  // namespace layerd
