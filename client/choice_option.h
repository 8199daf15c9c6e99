// Options of a command line whose value is one of a few names.
#ifndef LAYERD_CLIENT_CHOICE_OPTION_H_
#define LAYERD_CLIENT_CHOICE_OPTION_H_

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "lib/base/dtype.h"
#include "lib/weights/spec_names.h"

namespace layerd {

inline constexpr std::pair<const char*, DType> kDTypeNames[] = {
    {"float32", DType::kFloat32}, {"float16", DType::kFloat16}, {"bfloat16", DType::kBFloat16}};

// An option that sets `target`, a T or an optional one, to the value that `table` has for a name.
template <typename T, typename Target, size_t kRows>
CLI::Option* AddChoice(CLI::App& app, const std::string& flag, Target& target,
                       const std::pair<const char*, T> (&table)[kRows], const std::string& help) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.emplace_back(name);
  return app
      .add_option_function<std::string>(
          flag, [&target, &table](const std::string& name) { target = *ValueIn(table, name); }, help)
      ->check(CLI::IsMember(names))
      ->type_name(absl::StrJoin(names, "|"));
}

}  // namespace layerd

#endif  // LAYERD_CLIENT_CHOICE_OPTION_H_
