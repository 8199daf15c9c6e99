#include "lib/base/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "lib/base/errors.h"

namespace layerd {
namespace {

TEST(TensorTest, AdoptedBytesAreSharedAndKeepTheirOwnerAlive) {
  auto owner = std::make_shared<std::vector<float>>(std::vector<float>{1, 2, 3});
  std::weak_ptr<std::vector<float>> watch = owner;
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(owner->data()), 12);
  auto tensor = Tensor::Adopt(DType::kFloat32, {3}, owner, bytes);
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(tensor->data(), bytes.data());
  owner.reset();
  EXPECT_FALSE(watch.expired());
  const Tensor copy = *tensor;
  tensor = absl::UnknownError("gone");
  EXPECT_EQ(copy.At(2), 3.0f);
}

TEST(TensorTest, MisalignedBytesAreCopied) {
  alignas(8) std::byte storage[13];
  const float values[3] = {1, -2, 3};
  std::memcpy(storage + 1, values, 12);
  const auto tensor = Tensor::Adopt(DType::kFloat32, {3}, nullptr, absl::MakeConstSpan(storage + 1, 12));
  ASSERT_TRUE(tensor.ok());
  EXPECT_NE(tensor->data(), storage + 1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data()) % 4, 0u);
  EXPECT_EQ(tensor->At(1), -2.0f);
}

absl::Span<const std::byte> BytesOf(const float* values, size_t count) {
  return {reinterpret_cast<const std::byte*>(values), count * sizeof(float)};
}

// [0, 1, 2, 3, 4] in pieces that end within elements, some of them empty.
struct Scattered {
  const float values[5] = {0, 1, 2, 3, 4};
  const Tensor together = Tensor::FromFloats(DType::kFloat32, {5}, values);
  const Tensor tensor = *Tensor::AdoptPieces(
      DType::kFloat32, {5}, nullptr,
      {BytesOf(values, 5).subspan(0, 0), BytesOf(values, 5).subspan(0, 6), BytesOf(values, 5).subspan(6, 0),
       BytesOf(values, 5).subspan(6, 13), BytesOf(values, 5).subspan(19, 1)});
};

TEST(TensorTest, PiecesAreGatheredWhenTheyAreAskedForAsOne) {
  const Scattered scattered;
  EXPECT_TRUE(scattered.tensor.is_scattered());
  EXPECT_TRUE(SameBits(scattered.tensor, scattered.together));
  EXPECT_EQ(scattered.tensor.data(), scattered.tensor.data()) << "gathered once";
  EXPECT_EQ(reinterpret_cast<uintptr_t>(scattered.tensor.data()) % 4, 0u);
  EXPECT_TRUE(SameBits(scattered.tensor.Reshaped({1, 5}), scattered.together.Reshaped({1, 5})));
  EXPECT_TRUE(SameBits(scattered.tensor.Reshaped({5, 1}).Rows(1, 3), scattered.together.Reshaped({5, 1}).Rows(1, 3)));
  const Tensor copy = scattered.tensor.Together();
  EXPECT_FALSE(copy.is_scattered());
  EXPECT_TRUE(SameBits(copy, scattered.together));
}

TEST(TensorTest, APartOfAScatteredTensorIsReadWhereItLiesIfItCanBe) {
  const Scattered scattered;
  float to[5];
  auto* const bytes = reinterpret_cast<std::byte*>(to);
  for (int64_t first = 0; first <= 5; ++first) {
    for (int64_t count = 0; first + count <= 5; ++count) {
      std::fill_n(to, 5, -1.0f);
      const std::byte* read = scattered.tensor.Read(first, count, bytes);
      EXPECT_EQ(std::memcmp(read, scattered.values + first, static_cast<size_t>(count) * 4), 0)
          << first << " " << count;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(read) % 4, 0u);
      EXPECT_EQ(scattered.together.Read(first, count, bytes), scattered.together.data() + first * 4);
    }
  }
  EXPECT_EQ(scattered.tensor.Read(0, 1, bytes), BytesOf(scattered.values, 1).data());
  EXPECT_EQ(scattered.tensor.Read(2, 2, bytes), BytesOf(scattered.values + 2, 1).data());
  EXPECT_EQ(scattered.tensor.Read(1, 1, bytes), bytes) << "it lies in two pieces";
  EXPECT_EQ(to[1], -1.0f) << "no more is copied";
}

TEST(TensorTest, OnePieceIsSharedAndOneThatIsNotAlignedIsNotCopied) {
  alignas(8) std::byte storage[13];
  const float values[3] = {1, -2, 3};
  std::memcpy(storage + 1, values, 12);
  const auto crooked = Tensor::AdoptPieces(DType::kFloat32, {3}, nullptr, {absl::MakeConstSpan(storage + 1, 12)});
  ASSERT_TRUE(crooked.ok());
  EXPECT_TRUE(crooked->is_scattered());
  EXPECT_EQ(crooked->At(1), -2.0f);
  const auto straight = Tensor::AdoptPieces(DType::kFloat32, {3}, nullptr, {BytesOf(values, 3)});
  ASSERT_TRUE(straight.ok());
  EXPECT_FALSE(straight->is_scattered());
  EXPECT_EQ(straight->data(), BytesOf(values, 3).data());
  EXPECT_TRUE(Tensor::AdoptPieces(DType::kFloat32, {0}, nullptr, {}).ok());
}

TEST(TensorTest, PiecesThatDoNotFitTheShapeAreRefusedWithBothNumbers) {
  const float values[2] = {};
  const auto tensor = Tensor::AdoptPieces(DType::kFloat32, {3}, nullptr, {BytesOf(values, 1), BytesOf(values + 1, 1)});
  EXPECT_EQ(tensor.status().message(), "data: expected 12 bytes for float32 [3], got 8");
}

TEST(TensorTest, ByteCountsThatDoNotFitAreRefusedWithBothNumbers) {
  const std::byte bytes[8] = {};
  const auto tensor = Tensor::Adopt(DType::kFloat32, {3}, nullptr, absl::MakeConstSpan(bytes, 8));
  EXPECT_EQ(tensor.status().message(), "data: expected 12 bytes for float32 [3], got 8");
  EXPECT_EQ(DetailsOf(tensor.status()).reason, "BYTE_COUNT_MISMATCH");
}

TEST(TensorTest, BadShapesAreRefusedBeforeTheirBytesAreCounted) {
  const auto tensor = Tensor::Adopt(DType::kFloat32, {-1}, nullptr, {});
  EXPECT_EQ(DetailsOf(tensor.status()).field, "shape");
}

TEST(TensorTest, RowsShareTheBytesAndKeepThemAlive) {
  std::vector<float> values(12);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  auto whole = std::make_unique<Tensor>(Tensor::FromFloats(DType::kBFloat16, {3, 2, 2}, values));
  const Tensor rows = whole->Rows(1, 2), none = whole->Rows(3, 0);
  EXPECT_EQ(rows.data(), whole->data() + 8);
  whole.reset();
  EXPECT_TRUE(SameBits(rows, Tensor::FromFloats(DType::kBFloat16, {2, 2, 2}, {4, 5, 6, 7, 8, 9, 10, 11})));
  EXPECT_TRUE(SameBits(none, Tensor::Allocate(DType::kBFloat16, {0, 2, 2})));
  EXPECT_EQ(Tensor::Allocate(DType::kFloat32, {0, 4}).Rows(0, 0).shape(), (Shape{0, 4}));
}

TEST(TensorTest, EmptyTensorsAreLegal) {
  const auto tensor = Tensor::Adopt(DType::kBFloat16, {0, 64}, nullptr, {});
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(tensor->num_bytes(), 0u);
  EXPECT_TRUE(SameBits(*tensor, Tensor::Allocate(DType::kBFloat16, {0, 64})));
}

TEST(TensorTest, FloatsAreNarrowedToTheDtype) {
  const Tensor tensor = Tensor::FromFloats(DType::kBFloat16, {2}, {1.0f, 3.14f});
  EXPECT_EQ(std::to_integer<int>(tensor.data()[0]), 0x80);  // 1.0 is the bytes 80 3F
  EXPECT_EQ(std::to_integer<int>(tensor.data()[1]), 0x3F);
  EXPECT_EQ(tensor.At(1), 3.140625f);
}

TEST(TensorTest, SameBitsSeesDtypeShapeAndSignOfZero) {
  const Tensor a = Tensor::FromFloats(DType::kFloat32, {2}, {0.0f, 1.0f});
  EXPECT_TRUE(SameBits(a, Tensor::FromFloats(DType::kFloat32, {2}, {0.0f, 1.0f})));
  EXPECT_FALSE(SameBits(a, Tensor::FromFloats(DType::kFloat32, {2}, {-0.0f, 1.0f})));
  EXPECT_FALSE(SameBits(a, a.Reshaped({2, 1})));
  EXPECT_FALSE(SameBits(a, Tensor::FromFloats(DType::kFloat16, {2}, {0.0f, 1.0f})));
}

TEST(TensorTest, AllocatedMemoryIsAlignedToCacheLines) {
  for (const int64_t n : {0, 1, 7, 1000}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(Tensor::Allocate(DType::kFloat16, {n}).data()) % 64, 0u);
  }
}

}  // namespace
}  // namespace layerd
