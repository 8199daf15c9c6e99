// Sends bytes to the codec that leaves tensors where they are and to protobuf, and ends at the first difference. For
// libFuzzer: cmake --preset fuzz, build/fuzz/bin/codec_fuzz -max_total_time=600.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/fuzz/codec_agreement.h"
#include "tests/fuzz/random_messages.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace layerd {
namespace {

// The first byte of the data chooses the type and the second how it comes in slices.
constexpr size_t kHeadBytes = 2;

const google::protobuf::Message& PrototypeOf(uint8_t choice) {
  switch (choice % 6) {
    case 0:
      return v1::NormalizeRequest::default_instance();
    case 1:
      return v1::FeedForwardRequest::default_instance();
    case 2:
      return v1::NormalizeResponse::default_instance();
    case 3:
      return v1::FeedForwardResponse::default_instance();
    case 4:
      return v1::StreamNormalizeRequest::default_instance();
    default:
      return v1::StreamFeedForwardRequest::default_instance();
  }
}

}  // namespace
}  // namespace layerd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer silencer;
  if (size < layerd::kHeadBytes) return 0;
  layerd::Random random(data[1]);
  const std::string bytes(reinterpret_cast<const char*>(data) + layerd::kHeadBytes, size - layerd::kHeadBytes);
  const auto& prototype = layerd::PrototypeOf(data[0]);
  const auto both = layerd::Compare(random, prototype, bytes);
  if (both.difference.empty()) return 0;
  std::fprintf(stderr, "%s: %s (legal to protobuf: %s)\n", prototype.GetTypeName().c_str(), both.difference.c_str(),
               both.legal ? "yes" : "no");
  std::abort();
}

// Now and then a message of its own making in place of what libFuzzer has: it does not find tensors by itself.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  layerd::Random random(seed);
  if (size < layerd::kHeadBytes || layerd::Below(random, 4) != 0) return LLVMFuzzerMutate(data, size, max_size);
  const bool request = layerd::Below(random, 2) == 0;
  const auto message = [&] {
    return request ? layerd::RandomFeedForward(random).SerializeAsString()
                   : layerd::RandomNormalizeResponse(random).SerializeAsString();
  };
  const std::string before(reinterpret_cast<const char*>(data) + layerd::kHeadBytes, size - layerd::kHeadBytes);
  const bool fresh = layerd::Below(random, 2) == 0;
  const std::string after = layerd::Mutated(random, fresh ? message() : before, message());
  if (fresh) data[0] = request ? 1 : 2;
  data[1] = static_cast<uint8_t>(random());
  const size_t count = std::min(after.size(), max_size - layerd::kHeadBytes);
  std::memcpy(data + layerd::kHeadBytes, after.data(), count);
  return layerd::kHeadBytes + count;
}
