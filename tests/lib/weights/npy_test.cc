#include "lib/weights/npy.h"

#include <cstring>
#include <filesystem>
#include <limits>
#include <ostream>
#include <random>
#include <string_view>
#include <vector>

#include "tests/lib/weights/test_files.h"

namespace layerd {
namespace {

using namespace std::string_view_literals;

using ::testing::ElementsAre;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::string NpyBytes(const std::string& header, const std::string& data, int major = 1, int minor = 0) {
  std::string bytes = "\x93NUMPY";
  bytes += static_cast<char>(major);
  bytes += static_cast<char>(minor);
  const uint32_t length = static_cast<uint32_t>(header.size());
  bytes.append(reinterpret_cast<const char*>(&length), major == 1 ? 2 : 4);
  return bytes + header + data;
}

std::string FloatBytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

absl::StatusOr<Tensor> Read(const std::string& bytes) {
  const TemporaryFolder folder;
  return ReadNpy(folder.Write("a.npy", bytes));
}

TEST(ReadNpy, ReadsWhatNumPyWrites) {
  // np.save of np.array([[1, 2, 3], [4, 5, 6]], '<f4'): 118 bytes of header.
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
  header.resize(117, ' ');
  header += '\n';
  const auto tensor = Read(NpyBytes(header, FloatBytes({1, 2, 3, 4, 5, 6})));
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype(), DType::kFloat32);
  EXPECT_THAT(tensor->shape(), ElementsAre(2, 3));
  EXPECT_THAT(tensor->ToFloats(), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(ReadNpy, ReadsVersions2And3) {
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n";
  for (const int major : {1, 2, 3}) {
    const auto tensor = Read(NpyBytes(header, FloatBytes({5}), major));
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_THAT(tensor->ToFloats(), ElementsAre(5));
  }
}

TEST(ReadNpy, ReadsFloat16ScalarsAndEmptyArrays) {
  const auto half =
      Read(NpyBytes("{'descr': '<f2', 'fortran_order': False, 'shape': (2,)}", std::string("\0\x3c\0\xc0", 4)));
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_EQ(half->dtype(), DType::kFloat16);
  EXPECT_THAT(half->ToFloats(), ElementsAre(1, -2));
  const auto scalar = Read(NpyBytes("{\"shape\":(),\"descr\":\"<f4\",\"fortran_order\":True}", FloatBytes({3})));
  ASSERT_TRUE(scalar.ok()) << scalar.status();
  EXPECT_TRUE(scalar->shape().empty());
  const auto empty = Read(NpyBytes("{'descr': '<f4', 'fortran_order': True, 'shape': (0, 3), }", ""));
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_THAT(empty->shape(), ElementsAre(0, 3));
}

TEST(ReadNpy, BringsFortranOrderIntoCOrder) {
  const auto matrix =
      Read(NpyBytes("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", FloatBytes({1, 4, 2, 5, 3, 6})));
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  EXPECT_THAT(matrix->ToFloats(), ElementsAre(1, 2, 3, 4, 5, 6));

  // a[i][j][k] = 100i + 10j + k, first index fastest.
  std::vector<float> columns;
  std::vector<float> rows;
  for (int k = 0; k < 4; ++k) {
    for (int j = 0; j < 3; ++j) {
      for (int i = 0; i < 2; ++i) columns.push_back(static_cast<float>(100 * i + 10 * j + k));
    }
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) {
      for (int k = 0; k < 4; ++k) rows.push_back(static_cast<float>(100 * i + 10 * j + k));
    }
  }
  const auto cube =
      Read(NpyBytes("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3, 4), }", FloatBytes(columns)));
  ASSERT_TRUE(cube.ok()) << cube.status();
  EXPECT_EQ(cube->ToFloats(), rows);
}

struct HostileFile {
  const char* name;
  std::string bytes;
  std::string reason;  // without NPY_
  std::vector<std::string> parts;
};

std::string Shaped(const std::string& shape) {
  return NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + ", }\n", FloatBytes({1}));
}
std::string Described(const std::string& descr) {
  return NpyBytes("{'descr': " + descr + ", 'fortran_order': False, 'shape': (1,), }\n", FloatBytes({1}));
}

std::vector<HostileFile> HostileFiles() {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n";
  std::string long_length = NpyBytes(good, FloatBytes({1}), 2);
  std::memcpy(&long_length[8], "\xff\xff\xff\xff", 4);
  std::string past_end = NpyBytes(good, "");
  past_end[8] = static_cast<char>(good.size() + 1);
  return {
      {"Empty", "", "TRUNCATED", {"at least 8 bytes, got 0"}},
      {"NotNpy", "PK\x03\x04 a zip file", "MAGIC", {"NUMPY"}},
      {"MagicOnly", std::string("\x93NUMPY\x01\0", 8), "TRUNCATED", {"at least 10 bytes, got 8"}},
      {"Version4", NpyBytes(good, FloatBytes({1}), 4), "VERSION", {"got 4.0"}},
      {"Version1Point1", NpyBytes(good, FloatBytes({1}), 1, 1), "VERSION", {"got 1.1"}},
      {"HeaderPastTheEnd", past_end, "TRUNCATED", {"header"}},
      {"HeaderOf4GiB", long_length, "HEADER", {"too long", "4294967295"}},
      {"EmptyHeader", NpyBytes("", ""), "HEADER", {"'{'"}},
      {"NotADict", NpyBytes("[1, 2]", ""), "HEADER", {"'{'"}},
      {"Unclosed", NpyBytes("{'descr': '<f4'", ""), "HEADER", {"'}'"}},
      {"UnclosedString", NpyBytes("{'descr", ""), "HEADER", {"string to end"}},
      {"Escape", Described("'<f\\x34'"), "HEADER", {"escapes"}},
      {"NoShape", NpyBytes("{'descr': '<f4', 'fortran_order': False}", ""), "HEADER", {"the key shape"}},
      {"NoOrder", NpyBytes("{'descr': '<f4', 'shape': ()}", ""), "HEADER", {"the key fortran_order"}},
      {"EmptyDict", NpyBytes("{}", ""), "HEADER", {"the key descr"}},
      {"UnknownKey", NpyBytes("{'descr': '<f4', 'more': 1}", ""), "HEADER", {"\"more\""}},
      {"DoubleKey", NpyBytes("{'descr': '<f4', 'descr': '<f4'}", ""), "HEADER", {"\"descr\" again"}},
      {"Trailing",
       NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), } + x", FloatBytes({1})),
       "HEADER",
       {"nothing after"}},
      {"Call", NpyBytes("__import__('os')", ""), "HEADER", {"'{'"}},
      {"OrderIsANumber", NpyBytes("{'fortran_order': 0}", ""), "HEADER", {"True or False"}},
      {"ShapeIsANumber", Shaped("1"), "HEADER", {"tuple"}},
      {"ShapeIsAParenthesis", Shaped("(1)"), "HEADER", {"tuple"}},
      {"ShapeIsAList", Shaped("[1]"), "HEADER", {"tuple"}},
      {"Negative", Shaped("(-1,)"), "HEADER", {"0 or more"}},
      {"Fraction", Shaped("(1.0,)"), "HEADER", {"',' or ')'"}},
      {"Expression", Shaped("(1*1,)"), "HEADER", {"',' or ')'"}},
      {"LeadingZero", Shaped("(01,)"), "HEADER", {"leading zeros"}},
      {"LoneComma", Shaped("(,)"), "HEADER", {"0 or more"}},
      {"DoubleComma", Shaped("(1,,1)"), "HEADER", {"0 or more"}},
      {"Over64Bits", Shaped("(99999999999999999999,)"), "HEADER", {"2^63"}},
      {"Overflow", Shaped("(9223372036854775807, 9223372036854775807)"), "SHAPE", {"9223372036854775807"}},
      {"TooManyDimensions", Shaped("(1, 1, 1, 1, 1, 1, 1, 1, 1)"), "SHAPE", {"8 dimensions"}},
      {"TooFewBytes", Shaped("(2,)"), "BYTE_COUNT", {"expected 8 bytes", "float32 [2]", "got 4"}},
      {"TooManyBytes", Shaped("(0,)"), "BYTE_COUNT", {"expected 0 bytes", "got 4"}},
      {"Huge", Shaped("(65536, 65536)"), "BYTE_COUNT", {"17179869184"}},
      {"Float64", Described("'<f8'"), "DTYPE", {"float64 is not read", "astype('<f4')"}},
      {"BigEndian", Described("'>f4'"), "DTYPE", {"big-endian", "astype('<f4')"}},
      {"Integers", Described("'<i4'"), "DTYPE", {"\"<i4\"", "astype('<f4')"}},
      {"Unsigned", Described("'|u1'"), "DTYPE", {"'<f4', '<f2' or, of weights, '|i1'", "\"|u1\""}},
      {"BFloat16", Described("'<V2'"), "DTYPE", {"bfloat16", ".safetensors"}},
      {"Pickled", Described("'|O'"), "DTYPE", {"\"|O\""}},
      {"Structured", Described("[('x', '<f4')]"), "HEADER", {"structured"}},
  };
}

void PrintTo(const HostileFile& file, std::ostream* out) { *out << file.name; }

class HostileNpy : public ::testing::TestWithParam<HostileFile> {};

TEST_P(HostileNpy, IsRefusedSayingWhy) {
  const HostileFile& param = GetParam();
  const auto tensor = Read(param.bytes);
  ASSERT_FALSE(tensor.ok());
  ExpectError(tensor.status(), kInvalid, "NPY_" + param.reason, {"file: \"a.npy\": "});
  for (const std::string& part : param.parts) {
    EXPECT_THAT(std::string(tensor.status().message()), ::testing::HasSubstr(part));
  }
}

INSTANTIATE_TEST_SUITE_P(All, HostileNpy, ::testing::ValuesIn(HostileFiles()),
                         [](const auto& one) { return std::string(one.param.name); });

TEST(ReadNpy, DamagedFilesNeverCrash) {
  const TemporaryFolder folder;
  const std::string good = NpyBytes("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }\n", FloatBytes({1, 2}));
  std::mt19937 random(1);
  constexpr std::string_view alphabet = "{}()'\",: 0123456789LTF<f\n\0\xff"sv;
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = good.substr(0, i % 3 == 0 ? random() % good.size() : good.size());
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0 && !damaged.empty(); --changes) {
      damaged[random() % damaged.size()] = alphabet[random() % alphabet.size()];
    }
    // A new name each time: some file systems flush a file that is cut to nothing and written again.
    const auto tensor = ReadNpy(folder.Write(absl::StrCat(i, ".npy"), damaged));
    if (!tensor.ok()) {
      EXPECT_EQ(tensor.status().code(), kInvalid);
    }
  }
}

TEST(ReadNpy, MissingFileIsNotFound) {
  const TemporaryFolder folder;
  ExpectError(ReadNpy(folder.File("none.npy")).status(), absl::StatusCode::kNotFound, "FILE_NOT_FOUND", {"none.npy"});
  ExpectError(ReadNpy(folder.path()).status(), kInvalid, "FILE_NOT_REGULAR", {});
}

TEST(WriteNpy, WhatIsWrittenIsReadBack) {
  const TemporaryFolder folder;
  const std::string path = folder.File("w.npy");
  const std::vector<Tensor> tensors = {
      Tensor::FromFloats(DType::kFloat32, {}, {7}),
      Tensor::FromFloats(DType::kFloat32, {3}, {1, -0.0f, std::numeric_limits<float>::infinity()}),
      Tensor::FromFloats(DType::kFloat16, {2, 2}, {1, 2, 3, 4}),
      Tensor::FromFloats(DType::kInt8, {2, 3}, {-128, -1, 0, 1, 64, 127}),
      Tensor::Allocate(DType::kFloat32, {2, 0, 4}),
      Tensor::FromFloats(DType::kFloat16, {1, 1, 1, 1, 1, 1, 1, 1}, {0.5}),
  };
  for (const Tensor& tensor : tensors) {
    ASSERT_TRUE(WriteNpy(path, tensor).ok());
    const auto read = ReadNpy(path);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(SameBits(*read, tensor)) << ToString(tensor.shape());
    EXPECT_EQ((ReadWhole(path).size() - tensor.num_bytes()) % 64, 0u);
  }
}

TEST(WriteNpy, WritesTheBytesThatNumPyWrites) {
  const TemporaryFolder folder;
  ASSERT_TRUE(WriteNpy(folder.File("b.npy"), Tensor::FromFloats(DType::kFloat32, {2}, {1, 2})).ok());
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  header.resize(117, ' ');
  EXPECT_EQ(ReadWhole(folder.File("b.npy")), NpyBytes(header + "\n", FloatBytes({1, 2})));
}

TEST(WriteNpy, BFloat16IsRefused) {
  const TemporaryFolder folder;
  ExpectError(WriteNpy(folder.File("b.npy"), Tensor::FromFloats(DType::kBFloat16, {1}, {1})), kInvalid, "NPY_DTYPE",
              {"b.npy", "bfloat16", ".safetensors"});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace layerd
