#include "bench/temporary_folder.h"

#include <cstdlib>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "bench/fail.h"

namespace layerd::bench {

TemporaryFolder::TemporaryFolder(const std::filesystem::path& parent) : path_(parent / "layerd_bench_XXXXXX") {
  if (mkdtemp(path_.data()) == nullptr) Fail(absl::StrCat("no folder can be made in ", parent.string()));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;  // what has gone already is no matter
  std::filesystem::remove_all(path_, error);
}

}  // namespace layerd::bench
