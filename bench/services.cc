#include "bench/services.h"

#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/fail.h"
#include "client/remote_registry.h"
#include "lib/layers/layer.h"

namespace layerd::bench {

void Services::Start(const std::string& program, int threads) {
  folder_ = std::make_unique<TemporaryFolder>();
  memory_folder_ = std::make_unique<TemporaryFolder>("/dev/shm");  // files elsewhere are written to disks
  const auto path = [this](const char* name) { return absl::StrCat(folder_->path(), "/", name); };
  echo_ = std::make_unique<ChildProcess>(std::vector<std::string>{ProgramBeside("service_echo"), path("echo.sock"),
                                                                  folder_->path(), memory_folder_->path()},
                                         path("echo.log"));
  echo_tcp_ = echo_->ReadAddress();
  echo_unix_ = echo_->ReadAddress();
  std::filesystem::create_directory(path("layers"));
  daemon_ = std::make_unique<Daemon>(
      program, folder_->path(), std::vector<std::string>{"127.0.0.1:0", absl::StrCat("unix:", path("layerd.sock"))},
      std::vector<std::string>{absl::StrCat("--threads=", threads), "--max_message_mib=128",
                               absl::StrCat("--layer_store=", path("layers")),
                               absl::StrCat("--shared_memory_dir=", memory_folder_->path())});
}

void Services::Upload(const LayerUnderTest& layer) const {
  RemoteRegistry registry({.target = Target(true)});
  const auto listing = registry.Upload(kLayer, FeedForwardLayer{.spec = layer.spec, .weights = layer.weights});
  if (!listing.ok()) Fail(listing.status());
}

}  // namespace layerd::bench
