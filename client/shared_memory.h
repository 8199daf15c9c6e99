// Memory that this process shares with a layerd on the same host, so that tensors in it need not be sent.
//
//   auto memory = SharedMemory::Create({.target = target, .folder = "/dev/shm/layerd", .bytes = int64_t{256} << 20});
//   RemoteEngine engine({.target = target, .shared_memory = {*memory}});
//   call.inputs.input = *(*memory)->TensorAt(0, DType::kFloat32, {1024, 4096});   // to be filled
//   call.output_memory = (*memory)->PlaceAt(int64_t{64} << 20);
#ifndef LAYERD_CLIENT_SHARED_MEMORY_H_
#define LAYERD_CLIENT_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lib/base/memory_place.h"
#include "lib/base/tensor.h"

namespace layerd {

struct SharedMemoryOptions {
  std::string target = "127.0.0.1:50051";  // HOST:PORT, or unix:PATH; on this host
  std::string folder;                      // the server's --shared_memory_dir, as this process sees it
  int64_t bytes = 0;                       // at least 1
  std::string name;  // of the region and of its file; letters, digits, '.', '_' and '-'. Left out: one of its own
  int mode = 0600;   // the file's permissions: the server must be able to read and write it
};

// A file in the server's folder, registered as a region. Tensors and places in it keep the memory, but not the region: as
// soon as this is destroyed, it is unregistered and its file removed. Where the process is killed both stay, until
// somebody unregisters the region and removes the file.
//
// Threads: any.
class SharedMemory {
 public:
  // Makes the file, with memory for all of it, and registers it. INVALID_ARGUMENT for bad options; ALREADY_EXISTS for a name
  // that is taken; FAILED_PRECONDITION where the folder cannot be used; RESOURCE_EXHAUSTED where it is full; errors
  // of the server as it made them.
  static absl::StatusOr<std::shared_ptr<const SharedMemory>> Create(const SharedMemoryOptions& options);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  const std::string& region() const;
  // Aligned to a page; zeros at first.
  absl::Span<std::byte> memory() const;

  // `offset` must be a multiple of 64, for the server's sake, and all of the tensor must lie within. INVALID_ARGUMENT.
  absl::StatusOr<Tensor> TensorAt(int64_t offset, DType dtype, Shape shape) const;
  // From `offset`, which must lie within, to the end.
  MemoryPlace PlaceAt(int64_t offset) const;

 private:
  struct Impl;
  explicit SharedMemory(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace layerd

#endif  // LAYERD_CLIENT_SHARED_MEMORY_H_
