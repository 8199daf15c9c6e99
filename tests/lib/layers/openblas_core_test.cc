// Whatever core type of OpenBLAS a user asks for by OPENBLAS_CORETYPE, whether it sums in our order and is used, or not:
// the same bits. The library chooses once in a process, so that each has one of its own.
#include <gtest/gtest.h>
#include <stdio.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <map>
#include <string>

#include "lib/kernels/openblas.h"
#include "tests/lib/layers/layer_testing.h"

namespace layerd {
namespace {

void AddToHash(const Tensor& tensor, uint64_t& hash) {
  for (const std::byte byte : tensor.bytes()) hash = (hash ^ static_cast<uint64_t>(byte)) * 1099511628211u;
}

// What ItChangesNoBit runs: one line, of the core type, whether and how often it was asked, and the answers' hash.
TEST(OpenBlasCoreTest, DISABLED_PrintAnswers) {
  const auto report = InitMatMul(true);
  ASSERT_TRUE(report.ok()) << report.status();
  const int64_t calls = openblas::Calls();
  const Arena arena(2);
  constexpr int64_t kDim = 300, kHidden = 520;
  uint64_t hash = 14695981039346656037u;
  for (const WeightLayout layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    LayerForm form = LayerForms()[0];
    form.spec.layout = layout;
    for (const WeightKind& kind : WeightKinds(layout)) {
      const FeedForwardWeights weights = MakeWeights(form, kind, kDim, kHidden);
      for (const bool packed : {false, true}) {
        const TestLayer layer(form.spec, weights, packed);
        for (const int64_t rows : {1, 5, 70, 300}) {
          AddToHash(layer.Compute(arena, SeededInput(1, DType::kFloat32, {rows, kDim})).output, hash);
        }
      }
    }
  }
  std::printf("answers: core %s used %d calls %" PRId64 " hash %016" PRIx64 "\n",
              report->openblas_core.empty() ? "none" : report->openblas_core.c_str(), report->used,
              openblas::Calls() - calls, hash);
}

struct Answers {
  std::string core, hash;
  int used = -1;
  int64_t calls = -1;
};

// Of a process that is asked to use `core`, or nothing in particular.
Answers Ask(const std::string& core) {
  Answers answers;
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) <= 0) return answers;
  const std::string variable = core.empty() ? "-u OPENBLAS_CORETYPE" : "OPENBLAS_CORETYPE=" + core;
  const std::string command = "env " + variable + " '" + self +
                              "' --gtest_also_run_disabled_tests --gtest_filter='*DISABLED_PrintAnswers' 2>&1";
  FILE* const process = popen(command.c_str(), "r");
  if (process == nullptr) return answers;
  std::string all;
  for (char line[512]; fgets(line, sizeof(line), process) != nullptr; all += line) {
    char of_core[64], hash[64];
    if (std::sscanf(line, "answers: core %63s used %d calls %" SCNd64 " hash %63s", of_core, &answers.used,
                    &answers.calls, hash) != 4) {
      continue;
    }
    answers.core = of_core, answers.hash = hash;
  }
  EXPECT_EQ(pclose(process), 0) << all;
  return answers;
}

TEST(OpenBlasCoreTest, ItChangesNoBit) {
  std::map<std::string, bool> cores = {{"", true}, {"Prescott", true}};
#if defined(__x86_64__)
  cores["Sandybridge"] = __builtin_cpu_supports("avx");
  cores["Haswell"] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  cores["SkylakeX"] = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  const Answers expected = Ask("");
  ASSERT_EQ(expected.hash.size(), 16u);
  for (const auto& [core, supported] : cores) {
    if (!supported) continue;
    SCOPED_TRACE(core.empty() ? "unset" : core);
    const Answers answers = core.empty() ? expected : Ask(core);
    EXPECT_EQ(answers.hash, expected.hash);
    if (expected.core == "none") continue;  // no library to choose
    if (!core.empty()) {
      EXPECT_EQ(answers.core, core);
    }
    EXPECT_EQ(answers.used == 1, answers.calls > 0);
    RecordProperty(core.empty() ? "unset" : core, answers.used);
    if (core == "Prescott") {
      EXPECT_EQ(answers.used, 0) << "its kernels do not fuse";
    }
  }
}

}  // namespace
}  // namespace layerd
