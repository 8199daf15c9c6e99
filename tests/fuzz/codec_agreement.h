// The codec that leaves tensors where they are, against protobuf: whether both say the same of some bytes.
#ifndef LAYERD_TESTS_FUZZ_CODEC_AGREEMENT_H_
#define LAYERD_TESTS_FUZZ_CODEC_AGREEMENT_H_

#include <google/protobuf/message.h>

#include <string>

#include "tests/fuzz/random_messages.h"

namespace layerd {

struct Agreement {
  bool legal = false;      // to protobuf
  std::string difference;  // empty: both say the same
};

// Receives `bytes`, in slices at random, as a message of the type of `prototype`.
Agreement Compare(Random& random, const google::protobuf::Message& prototype, const std::string& bytes);

}  // namespace layerd

#endif  // LAYERD_TESTS_FUZZ_CODEC_AGREEMENT_H_
