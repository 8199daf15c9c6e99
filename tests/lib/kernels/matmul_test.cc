#include "lib/kernels/matmul.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "lib/kernels/matmul_openblas.h"
#include "lib/kernels/openblas.h"
#include "lib/kernels/simd.h"
#include "lib/kernels/strips.h"
#include "tests/lib/kernels/kernel_testing.h"
#include "tests/lib/kernels/product_testing.h"

namespace layerd {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr WeightLayout kLayouts[] = {WeightLayout::kInOut, WeightLayout::kOutIn};
// The instrumented kernels are 50 times as slow: there, only some of the shapes.
constexpr int kShapeStep = kSanitized ? 7 : 1;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A product to be done, and its data.
struct Problem {
  int64_t rows, in, out;
  DType dtype = DType::kFloat32;
  WeightLayout layout = WeightLayout::kOutIn;
  std::vector<float> x = {};
  std::vector<std::byte> w = {};
  std::vector<float> bias = {};  // empty for none

  WeightView View() const { return {dtype, layout, in, out, w.data()}; }
  int64_t Index(int64_t n, int64_t k) const { return layout == WeightLayout::kInOut ? k * out + n : n * in + k; }
  float W(int64_t n, int64_t k) const { return LoadAsFloat(dtype, w.data(), Index(n, k)); }
  const float* BiasOrNull() const { return bias.empty() ? nullptr : bias.data(); }

  // Fills x and w from x(m, k) and w(n, k), w rounded to its dtype.
  void Fill(const std::function<float(int64_t, int64_t)>& x_of, const std::function<float(int64_t, int64_t)>& w_of) {
    x.resize(rows * in);
    w.resize(in * out * static_cast<int64_t>(SizeOf(dtype)));
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t k = 0; k < in; ++k) x[m * in + k] = x_of(m, k);
    }
    for (int64_t n = 0; n < out; ++n) {
      for (int64_t k = 0; k < in; ++k) StoreFromFloat(dtype, w_of(n, k), w.data(), Index(n, k));
    }
  }
  void FillNormal(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto next = [&](int64_t, int64_t) { return normal(random); };
    Fill(next, next);
    if (seed % 2 == 1) {
      bias.resize(out);
      for (float& value : bias) value = normal(random);
    }
  }

  std::string Name() const {
    return absl::StrCat(rows, " x ", in, " -> ", out, " ", std::string(layerd::Name(dtype)),
                        layout == WeightLayout::kInOut ? " [in, out]" : " [out, in]");
  }
};

std::vector<float> Multiply(const Arena& arena, const Problem& p) {
  std::vector<float> y(p.rows * p.out, -1234.5f);  // what was there before must not matter
  MatMul(arena, p.x.data(), p.rows, p.View(), p.BiasOrNull(), y.data());
  return y;
}

std::vector<float> Reference(const Problem& p) {
  return ProductInOrder(
      p.x, p.rows, p.in, p.out, [&](int64_t n, int64_t k) { return p.W(n, k); }, p.bias);
}

std::vector<Problem> Shapes() {
  std::vector<Problem> shapes;
  for (int64_t in : {1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1000}) {
    for (int64_t rows : {1, 5, 13, 26}) shapes.push_back({rows, in, 33});
    for (int64_t out : {1, 7, 8, 9, 31, 32, 64, 100}) shapes.push_back({3, in, out});
  }
  for (int64_t rows = 1; rows <= 40; ++rows) shapes.push_back({rows, 21, 1 + rows * 7 % 70});
  shapes.push_back({300, 300, 20});  // more rows than a tile
  shapes.push_back({17, 40, 1100});  // more columns
  std::mt19937 random(7);
  for (int i = 0; i < 40; ++i) {
    shapes.push_back({1 + static_cast<int64_t>(random() % 80), 1 + static_cast<int64_t>(random() % 600),
                      1 + static_cast<int64_t>(random() % 150)});
  }
  return shapes;
}

// Calls `check` for all the shapes, dtypes and layouts.
void ForEachProblem(const std::function<void(const Problem&)>& check) {
  uint32_t seed = 0;
  const std::vector<Problem> shapes = Shapes();
  for (size_t i = 0; i < shapes.size(); i += kShapeStep) {
    Problem p = shapes[i];
    for (DType dtype : kDTypes) {
      for (WeightLayout layout : kLayouts) {
        p.dtype = dtype;
        p.layout = layout;
        p.bias.clear();
        p.FillNormal(++seed);
        check(p);
      }
    }
  }
}

class MatMulTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto found = InitMatMul(true);
    ASSERT_TRUE(found.ok()) << found.status();
    report_ = *found;
  }
  void TearDown() override { SetSimd(SupportedSimd().back()); }

  MatMulReport report_;
};

TEST_F(MatMulTest, OwnKernelFollowsTheOrderOnEverySimd) {
  ASSERT_TRUE(InitMatMul(false).ok());
  const Arena arena(2);
  ForEachProblem([&](const Problem& p) {
    const std::vector<float> expected = Reference(p);
    for (Simd simd : SupportedSimd()) {
      ASSERT_TRUE(SetSimd(simd));
      EXPECT_TRUE(SameBits(Multiply(arena, p), expected, p.out)) << p.Name() << " on " << Name(simd);
    }
  });
}

TEST_F(MatMulTest, OpenBlasFollowsTheOrder) {
  if (!report_.used) GTEST_SKIP() << report_.reason;
  const int64_t calls_before = openblas::Calls();
  ForEachProblem([&](const Problem& p) {
    if (p.dtype != DType::kFloat32) return;
    std::vector<float> y(p.rows * p.out, -1234.5f);
    std::vector<float> memory(p.rows * p.in);
    RowBlocks x(memory.data(), p.rows, p.in, kOpenBlasRows);
    x.PutRows(0, p.rows, DType::kFloat32, reinterpret_cast<const std::byte*>(p.x.data()));
    for (int64_t group = 0; group < x.groups().count; ++group) {
      MatMulOpenBlas(x, group, p.View(), p.BiasOrNull(), 0, p.out, &y[x.groups().First(group) * p.out], p.out);
    }
    EXPECT_TRUE(SameBits(y, Reference(p), p.out)) << p.Name();
  });
  EXPECT_GT(openblas::Calls(), calls_before);
}

TEST_F(MatMulTest, TakesOpenBlasForManyRowsWhereItFollows) {
  if (!report_.used) GTEST_SKIP() << report_.reason;
  Problem p{300, 300, 200};
  p.FillNormal(1);
  int64_t calls = openblas::Calls();
  EXPECT_TRUE(SameBits(Multiply(Arena(2), p), Reference(p), p.out));
  EXPECT_GT(openblas::Calls(), calls) << "MatMul() did not use OpenBLAS";

  calls = openblas::Calls();
  for (Simd simd : SupportedSimd()) {
    if (simd == SupportedSimd().back()) continue;
    ASSERT_TRUE(SetSimd(simd));
    EXPECT_TRUE(SameBits(Multiply(Arena(2), p), Reference(p), p.out));
  }
  ASSERT_TRUE(SetSimd(SupportedSimd().back()));
  ASSERT_TRUE(InitMatMul(false).ok());
  EXPECT_TRUE(SameBits(Multiply(Arena(2), p), Reference(p), p.out));
  EXPECT_EQ(openblas::Calls(), calls) << "a forced target, or a forbidden OpenBLAS, was not heeded";
}

TEST_F(MatMulTest, RowHasTheSameBitsInEveryBatchOnAnyNumberOfThreads) {
  const Arena arenas[] = {Arena(1), Arena(2), Arena(3)};
  for (WeightLayout layout : kLayouts) {
    Problem p{1, 4096, 1024, DType::kFloat32, layout};
    p.rows = 64;
    p.FillNormal(3);
    p.rows = 1;
    const std::vector<float> alone = Multiply(arenas[0], p);
    for (p.rows = 1; p.rows <= 64; p.rows += kShapeStep) {
      for (const Arena& arena : arenas) {
        std::vector<float> y = Multiply(arena, p);
        y.resize(p.out);
        EXPECT_TRUE(SameBits(y, alone, p.out)) << "in a batch of " << p.rows << " on " << arena.threads();
      }
    }
  }
  // Across the number of rows from which OpenBLAS takes over, every row.
  for (DType dtype : kDTypes) {
    Problem p{300, 700, 130, dtype};
    p.FillNormal(4);
    const std::vector<float> all = Multiply(arenas[1], p);
    for (int64_t m = 0; m < 300; m += 23) {
      Problem one = p;
      one.rows = 1;
      one.x.assign(p.x.begin() + m * p.in, p.x.begin() + (m + 1) * p.in);
      const std::vector<float> expected(all.begin() + m * p.out, all.begin() + (m + 1) * p.out);
      EXPECT_TRUE(SameBits(Multiply(arenas[2], one), expected, p.out)) << "row " << m;
    }
  }
}

TEST_F(MatMulTest, KeepsDenormals) {
  for (int64_t rows : {1, 100, 300}) {
    Problem p{rows, 1, 40};
    p.Fill([](int64_t, int64_t) { return 0x1p-140f; }, [](int64_t, int64_t) { return 0.25f; });
    for (float value : Multiply(Arena(1), p)) EXPECT_EQ(value, 0x1p-142f);
  }
}

// Calls from so many threads at once, each with its own Arena or all with one.
void ExpectCallersToGetK(int callers, int64_t rows, int64_t in, int64_t out, const Arena& arena) {
  Problem p{rows, in, out};
  p.Fill([](int64_t, int64_t) { return 1.0f; }, [](int64_t, int64_t) { return 1.0f; });
  std::atomic<int> wrong{0}, waiting{callers};
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) {
    threads.emplace_back([&] {
      const Arena own(1);
      --waiting;
      while (waiting > 0) std::this_thread::yield();  // all at once
      for (int round = 0; round < 4; ++round) {
        for (float value : Multiply(round % 2 == 0 ? own : arena, p)) wrong += value != static_cast<float>(in);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(MatMulTest, ServesManyCallersAtOnce) {
  const Arena arena(3);
  ExpectCallersToGetK(64, 260, 300, 300, arena);
  ExpectCallersToGetK(64, 2, 700, 300, arena);
  ExpectCallersToGetK(320, 256, 64, 130, arena);
}

TEST_F(MatMulTest, KeepsAColumnToItself) {
  const Arena arena(3);
  for (int64_t rows : {1, 8, 300}) {
    Problem p{rows, 600, 515};
    const int64_t column = 257;
    p.Fill([](int64_t m, int64_t k) { return static_cast<float>((m + k) % 8); },
           [&](int64_t n, int64_t k) { return n == column ? static_cast<float>(k % 5) : 0.0f; });
    const std::vector<float> expected = Reference(p);
    for (int i = 0; i < 50; ++i) ASSERT_TRUE(SameBits(Multiply(arena, p), expected, p.out));
  }
}

TEST_F(MatMulTest, ZeroTimesInfinityIsNanAtEveryBatchSize) {
  for (bool allow_openblas : {true, false}) {
    ASSERT_TRUE(InitMatMul(allow_openblas).ok());
    for (Simd simd : SupportedSimd()) {
      ASSERT_TRUE(SetSimd(simd));
      for (WeightLayout layout : kLayouts) {
        for (int64_t rows : {1, 2, 3, 4, 5, 7, 12, 13, 64, 65, 100, 300}) {
          Problem p{rows, 2, 3, DType::kFloat32, layout};
          p.Fill([](int64_t, int64_t k) { return static_cast<float>(k); },
                 [](int64_t n, int64_t k) { return n == 1 ? (k == 0 ? kInf : 2.0f) : 1.0f; });
          const std::vector<float> y = Multiply(Arena(1), p);
          for (int64_t m = 0; m < rows; ++m) {
            EXPECT_TRUE(std::isnan(y[m * 3 + 1])) << rows;
            EXPECT_EQ(y[m * 3], 1);
            EXPECT_EQ(y[m * 3 + 2], 1);
          }
        }
      }
    }
  }
}

TEST_F(MatMulTest, NanAndInfinityStayInTheirRowAndNanIsOneValue) {
  for (int64_t rows : {3, 20, 100, 300}) {
    for (DType dtype : kDTypes) {
      Problem p{rows, 300, 40, dtype};
      p.FillNormal(10);
      const std::vector<float> clean = Multiply(Arena(2), p);
      p.x[1 * p.in + 299] = -kNan;
      p.x[2 * p.in + 5] = kInf;
      const std::vector<float> y = Multiply(Arena(2), p);
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t n = 0; n < p.out; ++n) {
          const float value = y[m * p.out + n];
          if (m == 1) {
            EXPECT_EQ(std::bit_cast<uint32_t>(value), 0x7FC00000u);
          } else if (m == 2) {
            EXPECT_EQ(value, p.W(n, 5) > 0 ? kInf : -kInf);
          } else {
            EXPECT_EQ(value, clean[m * p.out + n]);
          }
        }
      }
    }
  }
}

TEST_F(MatMulTest, ProductsThatUnderflowToMinusZeroGiveZero) {
  for (int64_t rows : {1, 100, 300}) {
    Problem p{rows, 1, 40};
    p.Fill([](int64_t, int64_t) { return -0x1p-100f; }, [](int64_t, int64_t) { return 0x1p-100f; });
    for (float value : Multiply(Arena(1), p)) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0u);
  }
}

TEST_F(MatMulTest, EmptyDimensionsGiveNothingOrTheBias) {
  const Arena arena(2);
  float untouched = 42;
  MatMul(arena, nullptr, 0, {DType::kFloat32, WeightLayout::kOutIn, 5, 7, nullptr}, nullptr, &untouched);
  MatMul(arena, &untouched, 1, {DType::kFloat32, WeightLayout::kOutIn, 1, 0, nullptr}, nullptr, &untouched);
  EXPECT_EQ(untouched, 42);
  for (Simd simd : SupportedSimd()) {
    ASSERT_TRUE(SetSimd(simd));
    for (int64_t rows : {1, 100}) {
      for (WeightLayout layout : kLayouts) {
        Problem p{rows, 0, 50, DType::kFloat32, layout};
        for (float value : Multiply(arena, p)) EXPECT_EQ(value, 0);
        p.bias.assign(50, 2.5f);
        for (float value : Multiply(arena, p)) EXPECT_EQ(value, 2.5f);
      }
    }
  }
}

TEST(InitMatMulTest, ReportsWhatItFoundAndLeavesTheEnvironmentAlone) {
  const char* threads = std::getenv("OPENBLAS_NUM_THREADS");
  const std::string threads_before = threads == nullptr ? "unset" : threads;
  const char* core = std::getenv("OPENBLAS_CORETYPE");
  const std::string core_before = core == nullptr ? "unset" : core;
  const auto report = InitMatMul(true);
  ASSERT_TRUE(report.ok()) << report.status();
  RecordProperty("core", report->openblas_core);
  EXPECT_EQ(report->used, report->follows_order);
  EXPECT_EQ(report->used, report->reason.empty()) << report->reason;
  if (!report->openblas_version.empty()) {
    EXPECT_EQ(report->openblas_version.rfind("OpenBLAS ", 0), 0u) << report->openblas_version;
    EXPECT_FALSE(report->openblas_core.empty());
  }
  if (core_before != "unset") {
    EXPECT_EQ(report->openblas_requested, "Prescott by OPENBLAS_CORETYPE");
  }
  threads = std::getenv("OPENBLAS_NUM_THREADS");
  EXPECT_EQ(threads == nullptr ? "unset" : threads, threads_before);
  core = std::getenv("OPENBLAS_CORETYPE");
  EXPECT_EQ(core == nullptr ? "unset" : core, core_before);
}

TEST(InitMatMulTest, LeavesOpenBlasOutWhereItIsNotAllowed) {
  const auto report = InitMatMul(false);
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->used);
  EXPECT_FALSE(report->follows_order);
  EXPECT_FALSE(report->reason.empty());
}

// Run by the next test in a process of its own, as the library's core type is chosen once.
TEST(InitMatMulTest, DISABLED_ChildWithPrescott) {
  const auto report = InitMatMul(true);
  ASSERT_TRUE(report.ok()) << report.status();
  if (report->openblas_version.empty()) GTEST_SKIP() << report->reason;
  EXPECT_EQ(report->openblas_core, "Prescott");
  EXPECT_EQ(report->openblas_requested, "Prescott by OPENBLAS_CORETYPE");
  EXPECT_FALSE(report->follows_order);
  EXPECT_FALSE(report->used);
  EXPECT_NE(report->reason.find("order"), std::string::npos) << report->reason;
  Problem p{300, 300, 200};
  p.FillNormal(1);
  const int64_t calls = openblas::Calls();
  EXPECT_TRUE(SameBits(Multiply(Arena(2), p), Reference(p), p.out));
  EXPECT_EQ(openblas::Calls(), calls);
}

TEST(InitMatMulTest, RespectsTheUsersCoreAndRefusesOneThatDoesNotFollowTheOrder) {
  char self[4096] = {};
  ASSERT_GT(readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
  const std::string command =
      absl::StrCat("OPENBLAS_CORETYPE=Prescott '", self,
                   "' --gtest_also_run_disabled_tests --gtest_filter='*ChildWithPrescott' 2>&1");
  EXPECT_EQ(std::system(command.c_str()), 0);
}

}  // namespace
}  // namespace layerd
