// The engine suite through memory that is shared with a real server: every tensor of a call lies there, and its output is
// written there.
#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "client/remote_engine.h"
#include "client/shared_memory.h"
#include "lib/base/errors.h"
#include "lib/base/shared_regions.h"
#include "lib/engine/cpu_engine.h"
#include "lib/engine/resident_engine.h"
#include "lib/layers/layer.h"
#include "server/server.h"
#include "tests/contract/layers_by_name_contract.h"
#include "tests/lib/base/temporary_folder.h"

namespace layerd {
namespace {

constexpr int64_t kMemoryBytes = int64_t{64} << 20;

// What a server is above of.
struct Served {
  TemporaryFolder folder;
  std::unique_ptr<SharedRegions> regions = *SharedRegions::Open(folder.path());
  CpuEngine cpu{{.threads = 2}};
  ContractLayers layers;
  ResidentEngine engine{layers.library(), cpu};
  LayerRegistry registry{layers.library(), nullptr, nullptr};
  std::unique_ptr<Server> server =
      *Server::Start({.grpc_listen = "127.0.0.1:0", .shared_memory = regions.get()}, engine, registry);

  std::string target() const { return server->addresses().front(); }
};

// Moves the tensors of calls into shared memory, each into a place of its own, and the output too. A call that says where
// its output goes is left as it is.
class SharingEngine : public LayerEngine {
 public:
  explicit SharingEngine(const std::string& target, const std::string& folder)
      : memory_(*SharedMemory::Create({.target = target, .folder = folder, .bytes = kMemoryBytes})),
        remote_({.target = target, .shared_memory = {memory_}}) {}

  void Normalize(NormalizeCall call, NormalizeDone done) override {
    if (call.output_memory) return remote_.Normalize(std::move(call), std::move(done));
    Move(call.inputs.input);
    for (auto* tensor : {&call.inputs.gamma, &call.inputs.beta, &call.inputs.residual, &call.inputs.gate}) {
      if (*tensor) Move(**tensor);
    }
    const int64_t offset = PutOutput(call);
    remote_.Normalize(std::move(call), [this, offset, done = std::move(done)](auto result) mutable {
      if (result.ok()) ExpectAt(offset, result->outputs.output);
      done(std::move(result));
    });
  }
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override {
    if (call.output_memory) return remote_.FeedForward(std::move(call), std::move(done));
    Move(call.input);
    for (const auto& [role, member] : kFeedForwardRoles) {
      if (call.weights.*member) Move(*(call.weights.*member));
    }
    const int64_t offset = PutOutput(call);
    remote_.FeedForward(std::move(call), [this, offset, done = std::move(done)](auto result) mutable {
      if (result.ok()) ExpectAt(offset, result->outputs.output);
      done(std::move(result));
    });
  }

 private:
  static constexpr int64_t kMostOutputBytes = int64_t{64} << 10;

  int64_t Take(int64_t bytes) {
    const int64_t offset = next_.fetch_add((bytes + 63) / 64 * 64);
    EXPECT_LE(offset + bytes, kMemoryBytes);
    return offset;
  }
  void Move(Tensor& tensor) {
    auto shared = memory_->TensorAt(Take(static_cast<int64_t>(tensor.num_bytes())), tensor.dtype(), tensor.shape());
    ASSERT_TRUE(shared.ok()) << shared.status();
    tensor.CopyTo(shared->mutable_data());
    tensor = *std::move(shared);
  }
  template <typename Call>
  int64_t PutOutput(Call& call) {
    const int64_t offset = Take(kMostOutputBytes);
    call.output_memory = memory_->PlaceAt(offset);
    return offset;
  }
  void ExpectAt(int64_t offset, const Tensor& output) {
    EXPECT_FALSE(output.is_scattered());
    EXPECT_EQ(output.data(), memory_->memory().data() + offset);
  }

  std::shared_ptr<const SharedMemory> memory_;
  std::atomic<int64_t> next_{0};
  RemoteEngine remote_;
};

EngineUnderTest MakeShared() {
  auto served = std::make_shared<Served>();
  auto engine = std::make_unique<SharingEngine>(served->target(), served->folder.path());
  return {std::move(served), std::move(engine)};
}

const auto kFactories = testing::Values(EngineFactory{"SharedMemory", [] { return MakeShared(); }});
INSTANTIATE_TEST_SUITE_P(RemoteEngine, EngineContractTest, kFactories,
                         [](const auto& factory) { return factory.param.name; });
INSTANTIATE_TEST_SUITE_P(RemoteEngine, LayersByNameContractTest, kFactories,
                         [](const auto& factory) { return factory.param.name; });

class SharedMemoryTest : public testing::Test {
 protected:
  std::shared_ptr<const SharedMemory> Create(SharedMemoryOptions options) {
    options.target = served_.target();
    options.folder = served_.folder.path();
    auto memory = SharedMemory::Create(options);
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }
  absl::StatusCode CodeOf(const SharedMemoryOptions& options) { return SharedMemory::Create(options).status().code(); }

  Served served_;
};

TEST_F(SharedMemoryTest, ARegionLivesAsLongAsItsOwner) {
  auto memory = Create({.bytes = 1000, .name = "mine"});
  EXPECT_EQ(memory->region(), "mine");
  EXPECT_EQ(memory->memory().size(), 1000u);
  const auto region = served_.regions->Find("mine");
  ASSERT_TRUE(region.ok()) << region.status();
  memory->memory()[999] = std::byte{7};
  EXPECT_EQ((*region)->data()[999], std::byte{7});
  const MemoryPlace place = memory->PlaceAt(64);
  memory.reset();
  EXPECT_EQ(served_.regions->Find("mine").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(std::filesystem::is_empty(served_.folder.path()));
  place.data.get()[0] = std::byte{1};  // the memory itself is there
  EXPECT_EQ((*region)->data()[64], std::byte{1});
}

TEST_F(SharedMemoryTest, WhatCannotBeMadeIsRefusedAndLeavesNothing) {
  const std::string target = served_.target(), folder = served_.folder.path();
  EXPECT_EQ(CodeOf({.target = target, .folder = folder, .bytes = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf({.target = target, .folder = folder, .bytes = 1, .name = "../x"}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf({.target = target, .folder = folder, .bytes = 1, .name = "no name"}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf({.target = target, .folder = folder + "/absent", .bytes = 1}),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(CodeOf({.target = target, .folder = folder, .bytes = int64_t{1} << 60}),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CodeOf({.target = "127.0.0.1:1", .folder = folder, .bytes = 1}), absl::StatusCode::kUnavailable);
  const TemporaryFolder other;  // not the server's
  EXPECT_EQ(CodeOf({.target = target, .folder = other.path(), .bytes = 1}), absl::StatusCode::kNotFound);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  EXPECT_TRUE(std::filesystem::is_empty(other.path()));
  const auto memory = Create({.bytes = 1, .name = "mine"});
  EXPECT_EQ(CodeOf({.target = target, .folder = folder, .bytes = 1, .name = "mine"}), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(served_.regions->Find("mine").ok());
}

TEST_F(SharedMemoryTest, TensorsLieWithin) {
  const auto memory = Create({.bytes = 1024});
  const auto tensor = memory->TensorAt(64, DType::kFloat32, {2, 120});
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->data(), memory->memory().data() + 64);
  EXPECT_TRUE(memory->TensorAt(1024, DType::kFloat32, {0, 4}).ok());
  for (const auto& [offset, shape] : {std::pair<int64_t, Shape>{64, {241}},
                                      {-64, {1}},
                                      {4, {1}},
                                      {1088, {0}},
                                      {int64_t{1} << 62, {1}},
                                      {0, {1 << 19, 1 << 19}},
                                      {0, {-1}}}) {
    EXPECT_EQ(memory->TensorAt(offset, DType::kFloat32, shape).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// The server finds it, since it alone sees where both lie.
TEST_F(SharedMemoryTest, AnOutputOverATensorIsRefused) {
  const auto memory = Create({.bytes = 4096});
  RemoteEngine engine({.target = served_.target(), .shared_memory = {memory}});
  NormalizeCall call;
  call.inputs.input = *memory->TensorAt(1024, DType::kFloat32, {2, 128});
  const auto at = [&](int64_t offset) {
    call.output_memory = memory->PlaceAt(offset);
    const absl::Status status = Normalize(engine, call).status();
    return status.ok() ? "" : DetailsOf(status).field + " " + DetailsOf(status).reason;
  };
  EXPECT_EQ(at(0), "");
  EXPECT_EQ(at(64), "output_memory OVERLAP");
  EXPECT_EQ(at(1024), "output_memory OVERLAP");
  EXPECT_EQ(at(1984), "output_memory OVERLAP");
  EXPECT_EQ(at(2048), "");
  EXPECT_EQ(at(3072), "");
  EXPECT_EQ(at(3136), "output_memory OUT_OF_RANGE");
}

TEST_F(SharedMemoryTest, ATensorThatIsNotAlignedIsSentInstead) {
  const auto memory = Create({.bytes = 4096});
  const Tensor all = *memory->TensorAt(0, DType::kFloat32, {3, 33});
  for (int i = 0; i < 99; ++i) const_cast<Tensor&>(all).mutable_floats()[i] = static_cast<float>(i);
  RemoteEngine engine({.target = served_.target(), .shared_memory = {memory}});
  NormalizeCall call;
  call.inputs.input = all.Rows(1, 2);
  const auto result = Normalize(engine, call);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(
      SameBits(result->outputs.output, Normalize(Arena(1), call.spec, call.inputs, std::nullopt, false)->output));
}

TEST_F(SharedMemoryTest, ATruncatedFileIsAnErrorAndTheServerGoesOn) {
  const auto memory = Create({.bytes = 1 << 20, .name = "cut"});
  RemoteEngine engine({.target = served_.target(), .shared_memory = {memory}});
  NormalizeCall call;
  call.inputs.input = *memory->TensorAt(0, DType::kFloat32, {64, 1024});
  ASSERT_TRUE(Normalize(engine, call).ok());
  std::filesystem::resize_file(served_.folder / "cut", 4096);
  const absl::Status status = Normalize(engine, call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(DetailsOf(status).reason, "REGION_TRUNCATED");
  EXPECT_EQ(DetailsOf(status).field, "input.shared_memory");
}

}  // namespace
}  // namespace layerd
