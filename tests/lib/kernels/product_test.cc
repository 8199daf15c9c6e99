#include "lib/kernels/product.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/kernels/openblas.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/product_testing.h"

namespace layerd {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Rows {
  Rows(std::vector<float> values, int64_t count, int64_t width) : x(std::move(values)), rows(count), in(width) {}
  Rows(uint32_t seed, int64_t count, int64_t width) : Rows(NormalFloats(seed, count * width), count, width) {}

  std::vector<float> x;  // [rows, in]
  int64_t rows, in;
};

// A matrix with what a product needs of it.
struct Operand {
  Operand(const TestMatrix& w, bool packed, std::vector<float> added = {})
      : matrix(w), panels(packed ? PanelsOf(w.View()) : Panels()), bias(std::move(added)) {}
  Factor AsFactor() const {
    Factor factor;
    if (panels.empty()) {
      factor.view = matrix.View();
    } else {
      factor.panels = &panels;
    }
    factor.bias = bias.empty() ? nullptr : bias.data();
    return factor;
  }
  std::vector<float> Expected(const Rows& rows) const {
    return ProductInOrder(
        rows.x, rows.rows, rows.in, matrix.out(), [&](int64_t n, int64_t k) { return matrix.At(n, k); }, bias);
  }

  const TestMatrix& matrix;
  Panels panels;
  std::vector<float> bias;
};

struct Answer {
  std::vector<float> first, second;
};

// Collects what the tail is given, and checks that tiles are what product.h says, and cover every output once.
Answer Multiply(const Arena& arena, const Rows& rows_of_x, const Factor& first, const Factor* second = nullptr) {
  const int64_t rows = rows_of_x.rows, out = first.out();
  std::vector<float> memory(rows_of_x.x.size());
  RowBlocks x(memory.data(), rows, rows_of_x.in, ProductGroupRows(rows, first, second));
  x.PutRows(0, rows, DType::kFloat32, reinterpret_cast<const std::byte*>(rows_of_x.x.data()));
  const float unset = -1234.5f;
  Answer y{std::vector<float>(rows * out, unset), std::vector<float>(second != nullptr ? rows * out : 0, unset)};
  std::vector<int> covered(rows * out);
  std::mutex mutex;
  Product(arena, x, first, second, [&](const ProductTile& tile) {
    const std::lock_guard<std::mutex> lock(mutex);
    const RowGroups& groups = x.groups();
    EXPECT_EQ(tile.row, groups.First(groups.Of(tile.row)));
    EXPECT_EQ(tile.row + tile.rows, groups.First(groups.Of(tile.row + tile.rows - 1) + 1));
    EXPECT_EQ(tile.col % kPanelOutputs, 0);
    EXPECT_GE(tile.stride, tile.cols);
    EXPECT_EQ(tile.second != nullptr, second != nullptr);
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; ++c) {
        const int64_t at = (tile.row + r) * out + tile.col + c;
        ++covered[at];
        y.first[at] = tile.first[r * tile.stride + c];
        if (second != nullptr) y.second[at] = tile.second[r * tile.stride + c];
      }
    }
    // All of it may be written to.
    std::fill_n(tile.first, tile.rows * tile.stride, kNan);
    if (second != nullptr) std::fill_n(tile.second, tile.rows * tile.stride, kNan);
  });
  EXPECT_EQ(std::count(covered.begin(), covered.end(), 1), rows * out);
  return y;
}

struct Size {
  int64_t rows, in, out;
};
// Tails of inputs by 4, 32 and 256; an odd last panel, outputs below 32; groups of every size; and some at random.
std::vector<Size> Sizes() {
  std::vector<Size> sizes = {{1, 1, 1},     {1, 257, 31},  {2, 3, 32},    {3, 31, 33},   {4, 34, 64},   {5, 256, 65},
                             {6, 300, 5},   {7, 33, 97},   {9, 4, 100},   {11, 255, 96}, {13, 515, 40}, {64, 70, 129},
                             {1, 600, 70},  {12, 64, 128}, {25, 40, 63},  {200, 36, 37}, {8, 1025, 34}, {14, 90, 33},
                             {15, 70, 100}, {16, 300, 65}, {17, 256, 64}, {29, 35, 32}};
  if (kSanitized) return sizes;
  std::mt19937 random(3);
  const auto up_to = [&](int64_t largest) { return 1 + static_cast<int64_t>(random()) % largest; };
  for (int i = 0; i < 20; ++i) sizes.push_back({up_to(50), up_to(600), up_to(150)});
  return sizes;
}

class ProductTest : public ::testing::Test {
 protected:
  void SetUp() override { AllowOpenBlas(false); }
  void TearDown() override { SetSimd(SupportedSimd().back()); }

  const Arena one_{1};
  const Arena two_{2};
};

TEST_F(ProductTest, EveryDTypeLayoutAndPlacePackedOrNotGivesTheSumsInOrderOnEverySimd) {
  uint32_t seed = 0;
  for (const Size& size : Sizes()) {
    const Rows x(++seed, size.rows, size.in);
    for (const DType dtype : kWeightDTypes) {
      for (const WeightLayout layout : LayoutsOf(dtype)) {
        for (const Within within : kWithins) {
          if (kSanitized && ++seed % 5 != 0) continue;
          TestMatrix matrix(dtype, layout, size.in, size.out, within);
          matrix.FillNormal(++seed);
          const std::vector<float> bias = seed % 2 == 0 ? NormalFloats(seed, size.out) : std::vector<float>();
          const Operand came(matrix, false, bias), packed(matrix, true, bias);
          const std::vector<float> expected = came.Expected(x);
          ForEachSimd([&](Simd) {
            const Arena& arena = seed % 3 == 0 ? one_ : two_;
            EXPECT_TRUE(SameBits(Multiply(arena, x, came.AsFactor()).first, expected, size.out))
                << size.rows << " x " << matrix.Name();
            EXPECT_TRUE(SameBits(Multiply(arena, x, packed.AsFactor()).first, expected, size.out))
                << size.rows << " x " << matrix.Name() << ", packed";
          });
        }
      }
    }
  }
}

TEST_F(ProductTest, TwoMatricesOfAnyTwoDTypesAreEachSummedInOrderOnEverySimd) {
  uint32_t seed = 100;
  for (const Size& size : {Size{1, 300, 33}, Size{5, 64, 64}, Size{7, 257, 97}, Size{30, 36, 31}}) {
    const Rows x(++seed, size.rows, size.in);
    for (const DType first_dtype : kWeightDTypes) {
      for (const DType second_dtype : kWeightDTypes) {
        TestMatrix first(first_dtype, WeightLayout::kOutIn, size.in, size.out, Within::kEverySecond);
        TestMatrix second(second_dtype, LayoutsOf(second_dtype).front(), size.in, size.out);
        first.FillNormal(++seed);
        second.FillNormal(++seed);
        const std::vector<float> first_bias = NormalFloats(++seed, size.out);
        const std::vector<float> second_bias = seed % 2 == 0 ? NormalFloats(++seed, size.out) : std::vector<float>();
        const std::vector<float> expected_first = Operand(first, false, first_bias).Expected(x);
        const std::vector<float> expected_second = Operand(second, false, second_bias).Expected(x);
        for (const auto& [first_packed, second_packed] :
             {std::pair(false, false), std::pair(true, true), std::pair(true, false), std::pair(false, true)}) {
          const Operand a(first, first_packed, first_bias), b(second, second_packed, second_bias);
          const Factor second_factor = b.AsFactor();
          ForEachSimd([&](Simd) {
            const Answer y = Multiply(two_, x, a.AsFactor(), &second_factor);
            EXPECT_TRUE(SameBits(y.first, expected_first, size.out))
                << first.Name() << " with " << second.Name() << " packed " << first_packed << second_packed;
            EXPECT_TRUE(SameBits(y.second, expected_second, size.out))
                << second.Name() << " after " << first.Name() << " packed " << first_packed << second_packed;
          });
        }
      }
    }
  }
}

TEST_F(ProductTest, TilesCoverEveryOutputOnceWhateverTheSizesAndThreads) {
  uint32_t seed = 500;
  for (const int threads : {1, 2, 5}) {
    const Arena arena(threads);
    for (const int64_t rows : {1, 6, 31, 65, 191, 193, 511, 1100}) {
      for (const int64_t out : {1, 32, 40, 64, 96, 300}) {
        const Rows x(++seed, rows, 9);
        TestMatrix matrix(DType::kBFloat16, WeightLayout::kOutIn, 9, out);
        matrix.FillNormal(++seed);
        const Operand packed(matrix, true), came(matrix, false, NormalFloats(seed, out));
        const Factor second = came.AsFactor();
        Multiply(arena, x, second);
        const Answer y = Multiply(arena, x, packed.AsFactor(), &second);
        EXPECT_TRUE(SameBits(y.first, packed.Expected(x), out)) << rows << " x " << out << " on " << threads;
        EXPECT_TRUE(SameBits(y.second, came.Expected(x), out)) << rows << " x " << out << " on " << threads;
      }
    }
  }
}

TEST_F(ProductTest, ANanIsAlwaysTheSameOneAndInfinityStaysInItsRow) {
  for (const DType dtype : kWeightDTypes) {
    TestMatrix matrix(dtype, WeightLayout::kOutIn, 300, 40);
    matrix.FillNormal(7);
    std::vector<float> values = NormalFloats(8, 9 * 300);
    values[1 * 300 + 299] = std::bit_cast<float>(0xFFC12345u);
    values[2 * 300 + 3] = std::bit_cast<float>(0x7F800001u);  // signalling
    values[3 * 300 + 5] = kInf;
    values[4 * 300 + 5] = -kInf, values[4 * 300 + 6] = kInf;
    const Rows x(values, 9, 300);
    ForEachSimd([&](Simd) {
      for (const bool packed : {false, true}) {
        const Operand w(matrix, packed, NormalFloats(9, 40));
        const std::vector<float> y = Multiply(two_, x, w.AsFactor()).first;
        EXPECT_TRUE(SameBits(y, w.Expected(x), 40)) << matrix.Name();
        for (int64_t n = 0; n < 40; ++n) {
          EXPECT_EQ(std::bit_cast<uint32_t>(y[1 * 40 + n]), 0x7FC00000u);
          EXPECT_EQ(std::bit_cast<uint32_t>(y[2 * 40 + n]), 0x7FC00000u);
          if (matrix.At(n, 5) != 0) {
            EXPECT_TRUE(std::isinf(y[3 * 40 + n]));
          }
          for (const int64_t m : {0, 5, 6, 7, 8}) EXPECT_TRUE(std::isfinite(y[m * 40 + n]));
        }
      }
    });
  }
}

// Weights of any bits: infinities and NaN in any place of any dtype, in the scales of int8 too, and denormals.
TEST_F(ProductTest, WeightsThatAreNotFiniteFollowIeee) {
  uint32_t seed = 700;
  for (const DType dtype : kWeightDTypes) {
    for (const WeightLayout layout : LayoutsOf(dtype)) {
      TestMatrix matrix(dtype, layout, 37, 70);
      matrix.FillBits(++seed);
      const Rows x(++seed, 7, 37);
      ForEachSimd([&](Simd) {
        for (const bool packed : {false, true}) {
          const Operand w(matrix, packed);
          EXPECT_TRUE(SameBits(Multiply(two_, x, w.AsFactor()).first, w.Expected(x), 70)) << matrix.Name();
        }
      });
    }
  }
}

TEST_F(ProductTest, WithoutInputsItIsTheBias) {
  const Rows x(std::vector<float>(), 9, 0);
  const std::vector<float> bias = NormalFloats(1, 70);
  ForEachSimd([&](Simd) {
    const Factor plain{.view = {DType::kFloat32, WeightLayout::kOutIn, 0, 70, nullptr}};
    Factor biased = plain;
    biased.bias = bias.data();
    const Answer y = Multiply(two_, x, plain, &biased);
    EXPECT_TRUE(SameBits(y.first, std::vector<float>(9 * 70, 0.0f), 70));
    for (int64_t i = 0; i < 9 * 70; ++i) EXPECT_EQ(y.second[i], bias[i % 70]);
  });
}

TEST_F(ProductTest, WithoutRowsOrOutputsTheTailIsNotCalled) {
  const auto never = [](const ProductTile&) { ADD_FAILURE() << "called"; };
  TestMatrix matrix(DType::kFloat32, WeightLayout::kOutIn, 5, 7);
  Product(two_, RowBlocks(nullptr, 0, 5, kGroupRows), {.view = matrix.View()}, nullptr, never);
  const std::vector<float> x = NormalFloats(1, 3 * 5);
  Product(two_, RowBlocks(const_cast<float*>(x.data()), 3, 5, kGroupRows),
          {.view = {DType::kFloat32, WeightLayout::kOutIn, 5, 0, nullptr}}, nullptr, never);
}

TEST_F(ProductTest, OpenBlasDoesLargeFloat32ProductsOfTwoMatricesAsTheyCameWithTheSameBits) {
  const auto report = InitMatMul(true);
  ASSERT_TRUE(report.ok()) << report.status();
  if (!report->used) GTEST_SKIP() << report->reason;
  uint32_t seed = 900;
  for (const Size& size : {Size{256, 300, 300}, Size{511, 40, 33}, Size{1100, 30, 600}, Size{3, 513, 600}}) {
    const Rows x(++seed, size.rows, size.in);
    for (const WeightLayout layout : LayoutsOf(DType::kFloat32)) {
      if (size.rows == 3 && layout == WeightLayout::kOutIn) continue;
      TestMatrix first(DType::kFloat32, layout, size.in, size.out, Within::kWiderRows);
      TestMatrix second(DType::kFloat32, layout, size.in, size.out);
      TestMatrix narrow(DType::kBFloat16, layout, size.in, size.out);
      for (TestMatrix* matrix : {&first, &second, &narrow}) matrix->FillNormal(++seed);
      const Operand a(first, false, NormalFloats(++seed, size.out)), b(second, false), packed(second, true);
      const Operand of_16_bits(narrow, false);
      const std::vector<float> expected_first = a.Expected(x), expected_second = b.Expected(x);
      const Factor by_openblas = b.AsFactor(), by_us = packed.AsFactor(), narrow_by_us = of_16_bits.AsFactor();

      int64_t calls = openblas::Calls();
      const Answer y = Multiply(two_, x, a.AsFactor(), &by_openblas);
      EXPECT_GT(openblas::Calls(), calls) << first.Name();
      EXPECT_TRUE(SameBits(y.first, expected_first, size.out)) << first.Name();
      EXPECT_TRUE(SameBits(y.second, expected_second, size.out)) << second.Name();

      calls = openblas::Calls();
      const Answer mixed = Multiply(two_, x, a.AsFactor(), &by_us);
      EXPECT_TRUE(SameBits(mixed.first, expected_first, size.out)) << first.Name();
      EXPECT_TRUE(SameBits(mixed.second, expected_second, size.out)) << second.Name();
      EXPECT_TRUE(SameBits(Multiply(two_, x, narrow_by_us).first, of_16_bits.Expected(x), size.out)) << narrow.Name();
      EXPECT_EQ(openblas::Calls(), calls) << "packed weights, and weights of 16 bits, are our kernel's";
    }
  }
}

TEST(RowBlocksTest, RowsAreInAsFewGroupsAsThereCanBeOfNearlyTheSameSize) {
  for (const int64_t group_rows : {1, 6, 14, 16, 512}) {
    for (int64_t rows = 1; rows <= 1100; ++rows) {
      const RowGroups groups(rows, group_rows);
      ASSERT_EQ(groups.count, (rows + group_rows - 1) / group_rows);
      ASSERT_EQ(groups.First(0), 0);
      ASSERT_EQ(groups.First(groups.count), rows);
      int64_t least = rows, most = 0;
      for (int64_t group = 0; group < groups.count; ++group) {
        least = std::min(least, groups.Size(group));
        most = std::max(most, groups.Size(group));
        for (int64_t row = groups.First(group); row < groups.First(group + 1); ++row) ASSERT_EQ(groups.Of(row), group);
      }
      ASSERT_LE(most, group_rows);
      ASSERT_LE(most - least, 1) << rows;
    }
  }
}

// However they are put, every value is where row_blocks.h says.
TEST(RowBlocksTest, LieAsDescribed) {
  std::mt19937 random(4);
  for (const int64_t group_rows : {6, 14, 16, 512}) {
    for (const int64_t rows : {1, 2, 5, 6, 7, 12, 13, 40}) {
      for (const int64_t width : {1, 31, 255, 256, 257, 600}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << width << " in groups of " << group_rows);
        const std::vector<float> x = NormalFloats(static_cast<uint32_t>(rows + width), rows * width);
        const RowGroups groups(rows, group_rows);
        std::vector<float> expected(x.size());
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t first = groups.First(groups.Of(row)), size = groups.Size(groups.Of(row));
          for (int64_t column = 0; column < width; ++column) {
            const int64_t k0 = column / 256 * 256, depth = std::min<int64_t>(256, width - k0);
            expected[k0 * rows + first * depth + (column - k0) * size + row - first] = x[row * width + column];
          }
        }
        std::vector<float> whole(x.size()), pieces(x.size());
        RowBlocks(whole.data(), rows, width, group_rows)
            .PutRows(0, rows, DType::kFloat32, reinterpret_cast<const std::byte*>(x.data()));
        EXPECT_EQ(whole, expected);

        RowBlocks blocks(pieces.data(), rows, width, group_rows);
        for (int64_t row = 0; row < rows;) {
          const int64_t some_rows = std::min<int64_t>(rows - row, 1 + static_cast<int64_t>(random() % 9));
          for (int64_t column = 0; column < width;) {
            const int64_t columns = std::min<int64_t>(width - column, 1 + static_cast<int64_t>(random() % 300));
            blocks.Put(row, some_rows, column, columns, &x[row * width + column], width);
            column += columns;
          }
          row += some_rows;
        }
        EXPECT_EQ(pieces, expected);
      }
    }
  }
}

TEST(RowBlocksTest, WidensNarrowRowsOnTheWayIn) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const int64_t rows = 20, width = 300;
    const std::vector<float> values = NormalFloats(3, rows * width);
    std::vector<std::byte> narrow(values.size() * 2);
    std::vector<float> wide(values.size()), got(values.size()), expected(values.size());
    for (int64_t i = 0; i < rows * width; ++i) {
      StoreFromFloat(dtype, values[i], narrow.data(), i);
      wide[i] = RoundTo(dtype, values[i]);
    }
    RowBlocks blocks(got.data(), rows, width, kGroupRows);
    blocks.PutRows(0, 9, dtype, narrow.data());
    blocks.PutRows(9, rows - 9, dtype, narrow.data() + 9 * width * 2);
    RowBlocks(expected.data(), rows, width, kGroupRows)
        .PutRows(0, rows, DType::kFloat32, reinterpret_cast<const std::byte*>(wide.data()));
    EXPECT_EQ(got, expected);
  }
}

}  // namespace
}  // namespace layerd
