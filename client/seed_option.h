// Options of a command line that are seeds.
#ifndef LAYERD_CLIENT_SEED_OPTION_H_
#define LAYERD_CLIENT_SEED_OPTION_H_

#include <CLI/CLI.hpp>
#include <limits>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {

// A check that a Seed holds the number: CLI11 would take the largest one for those that are larger.
template <typename Seed>
CLI::Validator SeedOf() {
  const auto check = [](std::string& text) {
    Seed seed = 0;
    if (absl::SimpleAtoi(text, &seed) && seed >= 0) return std::string();
    return absl::StrCat("expected a whole number from 0 to ", std::numeric_limits<Seed>::max(), ", got ",
                        Shortened(text));
  };
  return CLI::Validator(check, "");
}

}  // namespace layerd

#endif  // LAYERD_CLIENT_SEED_OPTION_H_
