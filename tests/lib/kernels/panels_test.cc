#include "lib/kernels/panels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/product_testing.h"

namespace layerd {
namespace {

// Calls check(matrix) for every dtype, layout and place in a larger matrix, filled with any bits, of some sizes around
// those of panels and blocks.
template <typename Check>
void ForEachMatrix(const Check& check) {
  const std::vector<int64_t> sizes =
      kSanitized ? std::vector<int64_t>{1, 33, 256} : std::vector<int64_t>{1, 31, 32, 33, 255, 256, 257};
  uint32_t seed = 0;
  for (const DType dtype : kWeightDTypes) {
    for (const WeightLayout layout : LayoutsOf(dtype)) {
      for (const Within within : kWithins) {
        for (const int64_t in : sizes) {
          for (const int64_t out : sizes) {
            TestMatrix matrix(dtype, layout, in, out, within);
            matrix.FillBits(++seed);
            SCOPED_TRACE(matrix.Name());
            check(matrix, within);
          }
        }
      }
    }
  }
}

// The bytes of a matrix in panels, as panels.h describes them.
std::vector<std::byte> DescribedBytes(const TestMatrix& w) {
  const auto width = static_cast<int64_t>(SizeOf(w.dtype()));
  const int64_t panels = (w.out() + 31) / 32;
  const int64_t panel_bytes = w.dtype() == DType::kInt8 ? w.blocks() * (64 + 1024) : w.in() * 32 * width;
  std::vector<std::byte> bytes(static_cast<size_t>(panels * panel_bytes));
  for (int64_t n = 0; n < w.out(); ++n) {
    std::byte* const panel = bytes.data() + n / 32 * panel_bytes;
    for (int64_t k = 0; k < w.in(); ++k) {
      const int64_t at =
          w.dtype() == DType::kInt8 ? k / 32 * 1088 + 64 + k % 32 * 32 + n % 32 : (k * 32 + n % 32) * width;
      std::memcpy(panel + at, w.data().data() + w.Index(n, k) * width, width);
      if (w.dtype() == DType::kInt8) panel[at] ^= std::byte{128};  // q + 128
    }
    for (int64_t block = 0; w.dtype() == DType::kInt8 && block < w.blocks(); ++block) {
      std::memcpy(panel + block * 1088 + n % 32 * 2, w.scale().data() + w.ScaleIndex(n, block) * 2, 2);
    }
  }
  return bytes;
}

bool HasBytes(const Panels& panels, const std::vector<std::byte>& bytes) {
  return panels.num_bytes() == static_cast<int64_t>(bytes.size()) &&
         std::memcmp(panels.panel(0), bytes.data(), bytes.size()) == 0;
}

TEST(PanelsTest, LieAsDescribedAndArePaddedWithZeros) {
  ForEachMatrix([](const TestMatrix& matrix, Within) {
    const Panels panels = PanelsOf(matrix.View());
    EXPECT_FALSE(panels.empty());
    EXPECT_EQ(panels.dtype(), matrix.dtype());
    EXPECT_EQ(panels.in(), matrix.in());
    EXPECT_EQ(panels.out(), matrix.out());
    EXPECT_EQ(panels.panels() * panels.panel_bytes(), panels.num_bytes());
    EXPECT_EQ(panels.num_bytes(), Panels::BytesOf(matrix.dtype(), matrix.in(), matrix.out()));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(panels.panel(0)) % 64, 0u);
    EXPECT_TRUE(HasBytes(panels, DescribedBytes(matrix)));
  });
}

TEST(PanelsTest, UnpackGivesEveryBitBackAndTouchesNothingElse) {
  ForEachMatrix([](const TestMatrix& matrix, Within within) {
    const Panels panels = PanelsOf(matrix.View());
    TestMatrix back(matrix.dtype(), matrix.layout(), matrix.in(), matrix.out(), within);
    panels.Unpack(back.View(), 0, 0);
    EXPECT_EQ(back.data(), matrix.data());
    EXPECT_EQ(back.scale(), matrix.scale());
  });
}

// The inputs first_in … and outputs first_out … of a view.
WeightView PartOf(const WeightView& whole, int64_t first_in, int64_t in, int64_t first_out, int64_t out) {
  const bool out_in = whole.layout == WeightLayout::kOutIn;
  WeightView part = whole;
  part.in = in, part.out = out;
  part.stride = whole.stride != 0 ? whole.stride : out_in ? whole.in : whole.out;
  part.data += (out_in ? first_out * part.stride + first_in : first_in * part.stride + first_out * whole.step) *
               static_cast<int64_t>(SizeOf(whole.dtype));
  if (whole.dtype == DType::kInt8) {
    part.scale_stride = whole.scale_stride != 0 ? whole.scale_stride : (whole.in + 31) / 32;
    part.scale += (first_out * part.scale_stride + first_in / 32) * 2;
  }
  return part;
}

// The same part of another matrix that lies alike.
WeightView MovedTo(WeightView part, const TestMatrix& from, const TestMatrix& to) {
  if (part.data != nullptr) part.data = to.data().data() + (part.data - from.data().data());
  if (part.scale != nullptr) part.scale = to.scale().data() + (part.scale - from.scale().data());
  return part;
}

// 0, n and up to four places between, each a multiple of `unit`.
std::vector<int64_t> Cuts(std::mt19937& random, int64_t n, int64_t unit) {
  std::vector<int64_t> cuts = {0, n};
  for (int i = 0; i < 4; ++i) cuts.push_back(static_cast<int64_t>(random()) % (n + 1) / unit * unit);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

TEST(PanelsTest, PiecesOfAnySizeInAnyOrderGiveTheSamePanelsAndComeBackOutOfThem) {
  std::mt19937 random(1);
  ForEachMatrix([&](const TestMatrix& matrix, Within within) {
    const WeightView whole = matrix.View();
    const bool int8 = matrix.dtype() == DType::kInt8;
    std::vector<WeightView> pieces;
    std::vector<std::pair<int64_t, int64_t>> places;
    const std::vector<int64_t> ins = Cuts(random, matrix.in(), int8 ? kScaleBlock : 1);
    const std::vector<int64_t> outs = Cuts(random, matrix.out(), 1);
    for (size_t i = 0; i + 1 < ins.size(); ++i) {
      for (size_t o = 0; o + 1 < outs.size(); ++o) {
        const WeightView piece = PartOf(whole, ins[i], ins[i + 1] - ins[i], outs[o], outs[o + 1] - outs[o]);
        pieces.push_back(piece);
        if (int8 && o % 2 == 0) {  // values and scales each for themselves
          pieces.back().scale = nullptr;
          pieces.push_back(piece);
          pieces.back().data = nullptr;
        }
        places.resize(pieces.size(), {ins[i], outs[o]});
      }
    }
    std::vector<size_t> order(pieces.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    Panels panels(matrix.dtype(), matrix.in(), matrix.out());
    for (const size_t i : order) panels.Pack(pieces[i], places[i].first, places[i].second);
    EXPECT_TRUE(HasBytes(panels, DescribedBytes(matrix)));

    TestMatrix back(matrix.dtype(), matrix.layout(), matrix.in(), matrix.out(), within);
    for (const size_t i : order) panels.Unpack(MovedTo(pieces[i], matrix, back), places[i].first, places[i].second);
    EXPECT_EQ(back.data(), matrix.data());
    EXPECT_EQ(back.scale(), matrix.scale());
  });
}

TEST(PanelsTest, MayLieInMemoryThatIsShared) {
  TestMatrix first(DType::kInt8, WeightLayout::kOutIn, 40, 70), second(DType::kBFloat16, WeightLayout::kInOut, 33, 31);
  first.FillBits(1);
  second.FillBits(2);
  const int64_t first_bytes = Panels::BytesOf(DType::kInt8, 40, 70);
  Panels a, b;
  EXPECT_TRUE(a.empty());
  {
    const std::shared_ptr<std::byte> memory = MapHugePages(first_bytes + Panels::BytesOf(DType::kBFloat16, 33, 31));
    a = Panels(DType::kInt8, 40, 70, memory);
    b = Panels(DType::kBFloat16, 33, 31, std::shared_ptr<std::byte>(memory, memory.get() + first_bytes));
  }
  b.Pack(second.View(), 0, 0);
  a.Pack(first.View(), 0, 0);
  EXPECT_EQ(b.panel(0), a.panel(0) + first_bytes);
  EXPECT_TRUE(HasBytes(a, DescribedBytes(first)));
  a = Panels();  // the memory lives as long as either does
  EXPECT_TRUE(HasBytes(b, DescribedBytes(second)));
}

TEST(PanelsTest, BytesAreThoseOfTheWeightsWithinTwoHundredthsWhereSizesAreMultiplesOf64) {
  EXPECT_EQ(Panels::BytesOf(DType::kFloat32, 5, 33), 2 * 5 * 32 * 4);
  EXPECT_EQ(Panels::BytesOf(DType::kFloat16, 5, 32), 5 * 32 * 2);
  EXPECT_EQ(Panels::BytesOf(DType::kInt8, 33, 1), 2 * (64 + 1024));
  for (const DType dtype : kWeightDTypes) {
    for (int64_t in = 64; in <= 512; in += 64) {
      for (int64_t out = 64; out <= 512; out += 64) {
        const int64_t scales = dtype == DType::kInt8 ? out * (in / 32) * 2 : 0;
        const double weights = static_cast<double>(in * out * static_cast<int64_t>(SizeOf(dtype)) + scales);
        EXPECT_LE(static_cast<double>(Panels::BytesOf(dtype, in, out)), 1.02 * weights) << Name(dtype) << in << out;
      }
    }
  }
}

TEST(PanelsTest, OffsetsAreWhereBlocksBegin) {
  for (const DType dtype : kWeightDTypes) {
    const Panels panels(dtype, 100, 32);
    const int64_t block = dtype == DType::kInt8 ? 1088 : 32 * 32 * static_cast<int64_t>(SizeOf(dtype));
    for (int64_t k = 0; k < 100; k += 32) EXPECT_EQ(panels.OffsetOf(k), k / 32 * block) << Name(dtype);
  }
}

TEST(MapHugePagesTest, GivesZerosThatCanBeWrittenAndBeginAtAHugePageWhereLarge) {
  constexpr int64_t kHuge = int64_t{2} << 20;
  for (const int64_t bytes : {int64_t{1}, int64_t{4096}, int64_t{4097}, kHuge - 1, kHuge, kHuge + 1, 3 * kHuge + 5}) {
    const std::shared_ptr<std::byte> memory = MapHugePages(bytes);
    EXPECT_TRUE(std::all_of(memory.get(), memory.get() + bytes, [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % (bytes >= kHuge ? kHuge : 4096), 0u) << bytes;
    std::memset(memory.get(), 0x5A, bytes);
    EXPECT_EQ(memory.get()[bytes - 1], std::byte{0x5A});
  }
}

TEST(MapHugePagesTest, ThrowsWhereThereIsNotSoMuch) { EXPECT_THROW(MapHugePages(int64_t{1} << 60), std::bad_alloc); }

}  // namespace
}  // namespace layerd
