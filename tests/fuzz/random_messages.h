// Messages with tensors from a seed, and what may be wrong with them on the wire. Threads: any, each with its own Random.
#ifndef LAYERD_TESTS_FUZZ_RANDOM_MESSAGES_H_
#define LAYERD_TESTS_FUZZ_RANDOM_MESSAGES_H_

#include <random>
#include <string>

#include "layerd/v1/layer_service.pb.h"

namespace layerd {

using Random = std::mt19937_64;

int Below(Random& random, int end);  // from 0 on
std::string RandomBytes(Random& random, size_t count);

v1::FeedForwardRequest RandomFeedForward(Random& random);
v1::NormalizeResponse RandomNormalizeResponse(Random& random);

// `bytes` of a message with something that is legal on the wire but seldom seen, or not legal, or with nothing changed.
// `other`: another message, of the same type.
std::string Mutated(Random& random, std::string bytes, const std::string& other);

}  // namespace layerd

#endif  // LAYERD_TESTS_FUZZ_RANDOM_MESSAGES_H_
