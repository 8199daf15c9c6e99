// The conversions behind public fault reports, by the kernel, on every SIMD target.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "lib/kernels/convert.h"
#include "tests/golden/golden_files.h"
#include "tests/lib/kernels/kernel_testing.h"

namespace layerd {
namespace {

TEST(ConversionsTest, NarrowingOfTheFaultReports) {
  LAYERD_GOLDEN_OR_SKIP(path, "cases/numerics.json");
  const nlohmann::json cases = ReadJson(path);
  int found = 0;
  for (const auto& one : cases) {
    if (one["op"] != "convert") continue;
    ++found;
    const DType dtype = one["kind"] == "f32_to_bf16" ? DType::kBFloat16 : DType::kFloat16;
    std::vector<float> values;
    for (const auto& value : one["input"]) {
      values.push_back(value.is_string() ? std::numeric_limits<float>::quiet_NaN() : value.get<float>());
    }
    ForEachSimd([&](Simd) {
      // Often enough for whole vectors and a rest.
      for (size_t copies : {1u, 7u, 40u}) {
        std::vector<float> many;
        for (size_t i = 0; i < copies; ++i) many.insert(many.end(), values.begin(), values.end());
        std::vector<uint16_t> bits(many.size());
        NarrowFromFloat(dtype, many.data(), reinterpret_cast<std::byte*>(bits.data()),
                        static_cast<int64_t>(many.size()));
        for (size_t i = 0; i < bits.size(); ++i) {
          const std::string expected = one["expected_bits"][i % values.size()];
          if (expected == "NaN") {
            EXPECT_TRUE(std::isnan(WidenFloat16(bits[i])));
          } else {
            EXPECT_EQ(bits[i], std::stoul(expected, nullptr, 16)) << one["kind"] << " " << many[i];
          }
        }
      }
    });
  }
  EXPECT_EQ(found, 2);
}

}  // namespace
}  // namespace layerd
