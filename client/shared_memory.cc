#include "client/shared_memory.h"

#include <fcntl.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "layerd/v1/shared_memory.grpc.pb.h"
#include "lib/base/errors.h"
#include "lib/base/shared_regions.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// What the server does is a matter of milliseconds.
constexpr std::chrono::seconds kTimeout{30};
constexpr int64_t kMaxAnswerBytes = int64_t{4} << 20;

std::string NameOfItsOwn() {
  std::random_device random;
  return absl::StrCat("layerd-", getpid(), "-", absl::Hex(random(), absl::kZeroPad8),
                      absl::Hex(random(), absl::kZeroPad8));
}

absl::Status FileError(absl::StatusCode code, const std::string& path, const char* what, int error) {
  ErrorDetails details;
  details.reason = "SHARED_FILE";
  return WithDetails(code, absl::StrCat(path, " ", what, ": ", std::generic_category().message(error)), details);
}

}  // namespace

// Each step that Create() has done is undone by the destructor.
struct SharedMemory::Impl {
  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (registered) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + kTimeout);
      v1::UnregisterRegionRequest request;
      request.set_name(name);
      google::protobuf::Empty answer;
      registry->UnregisterRegion(&context, request, &answer);  // a server that is gone has forgotten it anyway
    }
    if (!path.empty()) unlink(path.c_str());
  }

  absl::Status MakeFile(const SharedMemoryOptions& options) {
    const std::string wanted = absl::StrCat(options.folder, "/", name);
    const int fd = open(wanted.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
      const auto code = errno == EEXIST ? absl::StatusCode::kAlreadyExists : absl::StatusCode::kFailedPrecondition;
      return FileError(code, wanted, "cannot be made", errno);
    }
    path = wanted;
    auto status = Fill(fd, options);
    close(fd);
    return status;
  }

  absl::Status Fill(int fd, const SharedMemoryOptions& options) {
    if (fchmod(fd, static_cast<mode_t>(options.mode)) != 0) {
      return FileError(absl::StatusCode::kFailedPrecondition, path, "cannot have its permissions changed", errno);
    }
    // A full file system is told now, and not by a signal when a page is first written.
    if (const int error = posix_fallocate(fd, 0, options.bytes); error != 0) {
      return FileError(absl::StatusCode::kResourceExhausted, path, "cannot have its size", error);
    }
    const auto size = static_cast<size_t>(options.bytes);
    void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
      return FileError(absl::StatusCode::kResourceExhausted, path, "cannot be mapped", errno);
    }
    madvise(mapped, size, MADV_HUGEPAGE);  // where the system has them for shared memory
    bytes = options.bytes;
    data = std::shared_ptr<std::byte>(static_cast<std::byte*>(mapped), [size](std::byte* at) { munmap(at, size); });
    return absl::OkStatus();
  }

  absl::Status Register() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kTimeout);
    v1::RegisterRegionRequest request;
    request.set_name(name);
    request.set_file(name);
    v1::SharedMemoryRegion answer;
    const grpc::Status status = registry->RegisterRegion(&context, request, &answer);
    registered = status.ok();
    return status.ok() ? absl::OkStatus() : wire::DecodeStatus(status);
  }

  std::unique_ptr<v1::SharedMemoryRegistry::Stub> registry;
  std::string name;
  std::string path;  // empty: there is no file yet
  bool registered = false;
  int64_t bytes = 0;
  std::shared_ptr<std::byte> data;
};

absl::StatusOr<std::shared_ptr<const SharedMemory>> SharedMemory::Create(const SharedMemoryOptions& options) {
  if (options.bytes < 1) {
    return InvalidField("bytes", "OUT_OF_RANGE", absl::StrCat("expected 1 or more, got ", options.bytes));
  }
  if (options.name.find('/') != std::string::npos) {
    return InvalidField("name", "BAD_NAME", absl::StrCat("expected a name, no path, got ", Shortened(options.name)));
  }
  auto impl = std::make_unique<Impl>();
  impl->name = options.name.empty() ? NameOfItsOwn() : options.name;
  impl->registry = v1::SharedMemoryRegistry::NewStub(Connect(options.target, kMaxAnswerBytes));
  if (auto status = impl->MakeFile(options); !status.ok()) return status;
  if (auto status = impl->Register(); !status.ok()) return status;
  return std::shared_ptr<const SharedMemory>(new SharedMemory(std::move(impl)));
}

SharedMemory::SharedMemory(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SharedMemory::~SharedMemory() = default;

const std::string& SharedMemory::region() const { return impl_->name; }

absl::Span<std::byte> SharedMemory::memory() const { return {impl_->data.get(), static_cast<size_t>(impl_->bytes)}; }

absl::StatusOr<Tensor> SharedMemory::TensorAt(int64_t offset, DType dtype, Shape shape) const {
  const auto elements = NumElements(shape);
  if (!elements.ok()) return Under("shape", elements.status());
  const int64_t bytes = *elements * static_cast<int64_t>(SizeOf(dtype));
  if (offset < 0 || offset % SharedRegion::kAlignment != 0 || offset > impl_->bytes || bytes > impl_->bytes - offset) {
    return InvalidField("offset", "OUT_OF_RANGE",
                        absl::StrCat("expected a multiple of ", SharedRegion::kAlignment, " with ", bytes,
                                     " bytes behind it, in ", impl_->bytes, ", got ", offset));
  }
  const MemoryPlace place = PlaceAt(offset);
  return Tensor::AllocateAt(&place, dtype, std::move(shape));
}

MemoryPlace SharedMemory::PlaceAt(int64_t offset) const {
  return MemoryPlace{impl_->data, impl_->bytes}.Behind(offset);
}

}  // namespace layerd
