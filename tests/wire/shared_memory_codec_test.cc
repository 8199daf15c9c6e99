#include "wire/shared_memory_codec.h"

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "layerd/v1/layer_service.pb.h"
#include "lib/base/errors.h"
#include "tests/lib/base/temporary_folder.h"
#include "wire/feed_forward_codec.h"
#include "wire/message_routes.h"
#include "wire/normalize_codec.h"
#include "wire/stream_codec.h"
#include "wire/tensor_codec.h"

namespace layerd::wire {
namespace {

constexpr int64_t kRegionBytes = 4096;

void Refer(v1::SharedMemory& to, const std::string& region, int64_t offset) {
  to.set_region(region);
  to.set_offset(offset);
}

void ReferTensor(v1::Tensor& tensor, const std::vector<int64_t>& shape, int64_t offset) {
  tensor.set_dtype(v1::DTYPE_FLOAT32);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  Refer(*tensor.mutable_shared_memory(), "r", offset);
}

class SharedMemoryCodecTest : public testing::Test {
 protected:
  SharedMemoryCodecTest() {
    folder_.File("f", kRegionBytes);
    EXPECT_TRUE(regions_->Register("r", "f").ok());
    request_.mutable_spec()->set_kind(v1::NORM_KIND_RMS_NORM);
    ReferTensor(*request_.mutable_input(), {2, 100}, 64);
  }

  absl::StatusOr<NormalizeCall> Decode(bool on = true) {
    ReceivedStorage storage(nullptr);
    uses_ = {};
    if (auto status = FindRegions(request_, on ? regions_.get() : nullptr, storage, uses_); !status.ok()) return status;
    return DecodeCall(request_, storage);
  }
  void ExpectRefused(absl::StatusCode code, const std::string& field, const std::string& reason, bool on = true) {
    const absl::Status status = Decode(on).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(DetailsOf(status).field, field) << status;
    EXPECT_EQ(DetailsOf(status).reason, reason) << status;
    EXPECT_EQ(std::string(status.message()).rfind(field + ": ", 0), 0u) << status;
  }
  std::byte* data() { return (*regions_->Find("r"))->data(); }

  const TemporaryFolder folder_;
  std::unique_ptr<SharedRegions> regions_ = *SharedRegions::Open(folder_.path());
  v1::NormalizeRequest request_;
  RegionsInUse uses_;
};

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST_F(SharedMemoryCodecTest, TensorsLieInTheRegion) {
  ReferTensor(*request_.mutable_residual(), {2, 100}, 1024);
  Refer(*request_.mutable_output_memory(), "r", 2048);
  const auto call = Decode();
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->inputs.input.data(), data() + 64);
  EXPECT_EQ(call->inputs.input.shape(), (Shape{2, 100}));
  EXPECT_EQ(call->inputs.residual->data(), data() + 1024);
  EXPECT_EQ(call->output_memory->data.get(), data() + 2048);
  EXPECT_EQ(call->output_memory->bytes, kRegionBytes - 2048);
  EXPECT_TRUE(uses_.CheckIntact().ok());
}

TEST_F(SharedMemoryCodecTest, WeightsToo) {
  v1::FeedForwardRequest request;
  request.mutable_spec()->set_form(v1::FEED_FORWARD_FORM_PLAIN);
  request.mutable_spec()->set_activation(v1::ACTIVATION_RELU);
  request.mutable_spec()->set_layout(v1::WEIGHT_LAYOUT_OUT_IN);
  ReferTensor(*request.mutable_input(), {1, 4}, 0);
  ReferTensor(*request.mutable_weights()->mutable_up(), {8, 4}, 64);
  ReferTensor(*request.mutable_weights()->mutable_down(), {4, 8}, 192);
  Refer(*request.mutable_output_memory(), "r", 384);
  ReceivedStorage storage(nullptr);
  ASSERT_TRUE(FindRegions(request, regions_.get(), storage, uses_).ok());
  const auto call = DecodeCall(request, storage);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->weights.down->data(), data() + 192);
  EXPECT_EQ(call->output_memory->data.get(), data() + 384);
  request.mutable_weights()->mutable_down()->mutable_shared_memory()->set_region("s");
  ReceivedStorage other(nullptr);
  EXPECT_EQ(DetailsOf(FindRegions(request, regions_.get(), other, uses_)).field, "weights.down.shared_memory.region");
}

// Calls Visit(request, path) with each request that has one reference, and nothing beside the messages on the way to it.
template <typename Request, typename Visit>
void ForEachReference(const Visit& visit) {
  const MessageRoutes routes(*Request::descriptor()->file(), *v1::SharedMemory::descriptor());
  using Path = std::vector<const google::protobuf::FieldDescriptor*>;
  const std::function<void(Path)> follow = [&](const Path& path) {
    const auto& type = path.empty() ? *Request::descriptor() : *path.back()->message_type();
    for (const auto* field : routes.From(type)) {
      Path further = path;
      further.push_back(field);
      follow(further);
    }
    if (&type != v1::SharedMemory::descriptor()) return;
    Request request;
    google::protobuf::Message* at = &request;
    std::vector<std::string> names;
    for (const auto* field : path) {
      at = at->GetReflection()->MutableMessage(at, field);
      names.push_back(field->name());
    }
    visit(request, absl::StrJoin(names, "."));
  };
  follow({});
}

TEST_F(SharedMemoryCodecTest, NoReferenceIsOverlooked) {
  std::set<std::string> paths;
  const auto refused = [&](const auto& request, const std::string& path) {
    ReceivedStorage storage(nullptr);
    const ErrorDetails details = DetailsOf(FindRegions(request, nullptr, storage, uses_));
    EXPECT_EQ(details.reason, "SHARED_MEMORY_OFF") << path;
    EXPECT_EQ(details.field, path);
    paths.insert(path);
  };
  ForEachReference<v1::NormalizeRequest>(refused);
  EXPECT_EQ(paths, (std::set<std::string>{"input.shared_memory", "gamma.shared_memory", "beta.shared_memory",
                                          "residual.shared_memory", "gate.shared_memory", "output_memory"}));
  paths.clear();
  ForEachReference<v1::FeedForwardRequest>(refused);
  EXPECT_EQ(paths.size(), 15u);
  EXPECT_EQ(paths.count("weights.down_scale.shared_memory"), 1u);
}

TEST_F(SharedMemoryCodecTest, TheCallKeepsItsRegion) {
  auto call = Decode();
  ASSERT_TRUE(regions_->Unregister("r").ok());
  uses_ = {};
  ASSERT_TRUE(call.ok());
  call->inputs.input.mutable_floats()[0] = 1.5f;
  EXPECT_EQ(call->inputs.input.At(0), 1.5f);
}

TEST_F(SharedMemoryCodecTest, OffsetsAndSizesAreChecked) {
  v1::Tensor& input = *request_.mutable_input();
  v1::SharedMemory& at = *input.mutable_shared_memory();
  for (const int64_t offset : {int64_t{-64}, int64_t{-1}, kRegionBytes + 64, kRegionBytes + 1, int64_t{1} << 62,
                               std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    SCOPED_TRACE(offset);
    at.set_offset(offset);
    ExpectRefused(kInvalid, "input.shared_memory.offset", "OUT_OF_RANGE");
  }
  for (const int64_t offset : {1, 4, 32, 63, 65, 4095}) {
    at.set_offset(offset);
    ExpectRefused(kInvalid, "input.shared_memory.offset", "MISALIGNED");
  }
  at.set_offset(64);
  for (const Shape& shape : {Shape{1, 1009}, Shape{1008, 2}, Shape{2147483647, 128}, Shape{524288, 524288}}) {
    input.mutable_shape()->Assign(shape.begin(), shape.end());
    ExpectRefused(kInvalid, "input.shared_memory", "OUT_OF_RANGE");
  }
  for (const Shape& shape : {Shape{1, 1008}, Shape{0, 4}}) {
    input.mutable_shape()->Assign(shape.begin(), shape.end());
    EXPECT_TRUE(Decode().ok());
  }
  at.set_offset(kRegionBytes);  // nothing fits there but nothing
  EXPECT_TRUE(Decode().ok());
  for (const Shape& shape : {Shape{-1, 4}, Shape{16, (int64_t{1} << 60) + 2}, Shape{int64_t{1} << 62}}) {
    input.mutable_shape()->Assign(shape.begin(), shape.end());
    EXPECT_EQ(DetailsOf(Decode().status()).field, "input.shape");
  }
  Refer(*request_.mutable_output_memory(), "r", -64);
  ExpectRefused(kInvalid, "output_memory.offset", "OUT_OF_RANGE");
}

TEST_F(SharedMemoryCodecTest, OneSourceOnly) {
  request_.mutable_input()->set_data("x");
  ExpectRefused(kInvalid, "input.shared_memory", "TWO_SOURCES");
  request_.mutable_input()->clear_data();
  request_.mutable_input()->add_values(1);
  ExpectRefused(kInvalid, "input.shared_memory", "TWO_SOURCES");
}

TEST_F(SharedMemoryCodecTest, RegionsThatAreNotThereAreRefused) {
  request_.mutable_input()->mutable_shared_memory()->set_region("s");
  ExpectRefused(absl::StatusCode::kNotFound, "input.shared_memory.region", "REGION_NOT_FOUND");
  request_.mutable_input()->mutable_shared_memory()->set_region("");
  ExpectRefused(kInvalid, "input.shared_memory.region", "MISSING");
  ExpectRefused(absl::StatusCode::kFailedPrecondition, "input.shared_memory", "SHARED_MEMORY_OFF", /*on=*/false);
  request_.mutable_input()->clear_shared_memory();
  Refer(*request_.mutable_output_memory(), "s", 0);
  ExpectRefused(absl::StatusCode::kNotFound, "output_memory.region", "REGION_NOT_FOUND");
  ExpectRefused(absl::StatusCode::kFailedPrecondition, "output_memory", "SHARED_MEMORY_OFF", /*on=*/false);
}

TEST_F(SharedMemoryCodecTest, WhatIsCutOffMeanwhileIsToldByItsField) {
  Refer(*request_.mutable_output_memory(), "r", 2048);
  const auto call = Decode();
  ASSERT_TRUE(call.ok());
  std::filesystem::resize_file(folder_ / "f", 100);
  absl::Status status = uses_.CheckIntact();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(status).reason, "REGION_TRUNCATED");
  EXPECT_EQ(DetailsOf(status).field, "input.shared_memory");
  ExpectRefused(absl::StatusCode::kFailedPrecondition, "input.shared_memory", "REGION_TRUNCATED");
}

TEST_F(SharedMemoryCodecTest, StreamsHaveNone) {
  v1::StreamNormalizeRequest first;
  *first.mutable_call() = request_;
  std::optional<NormalizeCall> norm;
  EXPECT_EQ(DetailsOf(DecodeChunk(first, ReceivedStorage(nullptr), norm).status()).field, "call.input.shared_memory");
  v1::StreamFeedForwardRequest rows;
  ReferTensor(*rows.mutable_input(), {1, 4}, 0);
  std::optional<FeedForwardCall> layer = FeedForwardCall();
  const absl::Status status = DecodeChunk(rows, ReceivedStorage(nullptr), layer).status();
  EXPECT_EQ(DetailsOf(status).field, "input.shared_memory");
  EXPECT_EQ(DetailsOf(status).reason, "UNEXPECTED_FIELD");
}

// Whoever answers with a reference that nobody asked for is not believed.
TEST_F(SharedMemoryCodecTest, AReferenceThatNobodyLookedUpIsRefused) {
  v1::NormalizeResponse response;
  ReferTensor(*response.mutable_output(), {1, 4}, 0);
  const absl::Status status = DecodeResult(response, ReceivedStorage(nullptr)).status();
  EXPECT_EQ(DetailsOf(status).field, "output.shared_memory");
  EXPECT_EQ(DetailsOf(status).reason, "UNEXPECTED_FIELD");
}

TEST_F(SharedMemoryCodecTest, AnOutputInItsPlaceIsReferredTo) {
  Refer(*request_.mutable_output_memory(), "r", 2048);
  const auto call = Decode();
  ASSERT_TRUE(call.ok());
  NormalizeResult result;
  result.outputs.output = Tensor::AllocateAt(&*call->output_memory, DType::kFloat32, {2, 100});
  result.outputs.residual_sum = Tensor::Allocate(DType::kFloat32, {2, 100});
  v1::NormalizeResponse response;
  SentStorage storage;
  uses_.AddOutputTo(storage);
  EncodeResult(result, response, storage);
  EXPECT_EQ(response.output().shared_memory().region(), "r");
  EXPECT_EQ(response.output().shared_memory().offset(), 2048);
  EXPECT_TRUE(response.output().data().empty());
  EXPECT_EQ(response.residual_sum().data().size(), 800u);
  EXPECT_FALSE(response.residual_sum().has_shared_memory());
}

TEST(SentStorageTest, RefersToWhatLiesWithinAndAligned) {
  const Tensor memory = Tensor::Allocate(DType::kInt8, {1024});
  SentStorage storage;
  EXPECT_FALSE(storage.ReferenceTo(memory.bytes()).has_value());
  v1::SharedMemory reference;
  Refer(reference, "r", 128);
  storage.AddShared(memory.bytes(), reference);
  const auto at = [&](int64_t begin, size_t bytes) {
    const auto found = storage.ReferenceTo({memory.data() + begin, bytes});
    return found ? found->offset() : -1;
  };
  EXPECT_EQ(at(0, 1024), 128);
  EXPECT_EQ(at(64, 960), 192);
  EXPECT_EQ(at(1024, 0), 1152);
  EXPECT_EQ(at(0, 1025), -1);
  EXPECT_EQ(at(64, 961), -1);
  EXPECT_EQ(at(4, 4), -1);
  EXPECT_EQ(at(-64, 64), -1);
}

}  // namespace
}  // namespace layerd::wire
