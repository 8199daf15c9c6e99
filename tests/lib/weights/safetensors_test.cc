#include "lib/weights/safetensors.h"

#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string_view>
#include <vector>

#include "tests/lib/weights/test_files.h"

namespace layerd {
namespace {

using namespace std::string_view_literals;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::StatusOr<SafetensorsHeader> Parse(const std::string& json, uint64_t data_bytes = 0) {
  // A copy of exactly the header's size on the heap, so that AddressSanitizer sees a read past its end.
  const std::unique_ptr<char[]> copy(new char[json.size()]);
  std::memcpy(copy.get(), json.data(), json.size());
  return ParseSafetensorsHeader(std::string_view(copy.get(), json.size()), data_bytes, "\"f\"");
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets,
                      "}");
}
std::string One(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return absl::StrCat("{", Entry("t", dtype, shape, offsets), "}");
}

TEST(SafetensorsHeader, EmptyObjectHasNoTensors) {
  const auto header = Parse("{}");
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_TRUE(header->tensors.empty());
  EXPECT_TRUE(header->metadata.empty());
}

TEST(SafetensorsHeader, TrailingSpacesAndInnerWhitespaceAreFine) {
  EXPECT_TRUE(Parse("{}      ").ok());
  EXPECT_TRUE(Parse("{ \"__metadata__\" : { \"a\" : \"b\" } }  ").ok());
}

TEST(SafetensorsHeader, ReadsEntriesAndMetadata) {
  const auto header = Parse(
      absl::StrCat("{\"__metadata__\":{\"format\":\"pt\",\"é\":\"\\u00e9\"},", Entry("b", "BF16", "[2,3]", "[4,16]"),
                   ",", Entry("a", "F32", "[]", "[0,4]"), ",", Entry("c", "F64", "[0,9]", "[16,16]"), "}"),
      16);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->metadata.at("format"), "pt");
  EXPECT_EQ(header->metadata.at("é"), "é");
  ASSERT_EQ(header->tensors.size(), 3u);
  EXPECT_EQ(header->tensors.at("b").dtype, "BF16");
  EXPECT_THAT(header->tensors.at("b").shape, ElementsAre(2, 3));
  EXPECT_EQ(header->tensors.at("b").begin, 4u);
  EXPECT_EQ(header->tensors.at("b").end, 16u);
  EXPECT_TRUE(header->tensors.at("a").shape.empty());
  EXPECT_THAT(header->tensors.at("c").shape, ElementsAre(0, 9));
}

TEST(SafetensorsHeader, EmptyTensorsLieAnywhereBetweenOthers) {
  const auto between = [](const std::string& at) {
    return absl::StrCat("{", Entry("a", "F32", "[1]", "[0,4]"), ",", Entry("e", "F32", "[0]", at), ",",
                        Entry("z", "F32", "[1]", "[4,8]"), "}");
  };
  EXPECT_TRUE(Parse(between("[0,0]"), 8).ok());
  EXPECT_TRUE(Parse(between("[4,4]"), 8).ok());
  EXPECT_TRUE(Parse(between("[8,8]"), 8).ok());
  EXPECT_FALSE(Parse(between("[2,2]"), 8).ok());
  EXPECT_FALSE(Parse(between("[9,9]"), 8).ok());
}

TEST(SafetensorsHeader, DtypesThatLayersCannotUseAreChecked) {
  EXPECT_TRUE(Parse(One("I8", "[3]", "[0,3]"), 3).ok());
  EXPECT_TRUE(Parse(One("C64", "[3]", "[0,24]"), 24).ok());
  EXPECT_TRUE(Parse(One("F4", "[4]", "[0,2]"), 2).ok());
  EXPECT_TRUE(Parse(One("F6_E2M3", "[4]", "[0,3]"), 3).ok());
  ExpectError(Parse(One("F4", "[3]", "[0,2]"), 2).status(), kInvalid, "SAFETENSORS_BYTE_COUNT", {"F4 [3]"});
}

struct HostileHeader {
  const char* name;
  std::string json;
  uint64_t data_bytes;
  std::string reason;  // without SAFETENSORS_
  std::vector<std::string> parts;
};

std::string Repeat(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

std::vector<HostileHeader> HostileHeaders() {
  const std::string max = "9223372036854775807";
  const std::string nul(1, '\0');
  return {
      {"Empty", "", 0, "HEADER_JSON", {"'{'", "no bytes"}},
      {"LeadingSpace", " {}", 0, "HEADER_JSON", {"'{'", "\" \""}},
      {"ByteOrderMark", "\xEF\xBB\xBF{}", 0, "HEADER_JSON", {"'{'"}},
      {"List", "[]", 0, "HEADER_JSON", {"'{'", "\"[\""}},
      {"NotJson", "{", 0, "HEADER_JSON", {"not JSON"}},
      {"TrailingComma", "{\"__metadata__\":{},}", 0, "HEADER_JSON", {"not JSON", "byte 20"}},
      {"SingleQuotes", "{'a':1}", 0, "HEADER_JSON", {"not JSON"}},
      {"Comment", "{/**/}", 0, "HEADER_JSON", {"not JSON"}},
      {"TrailingGarbage", "{},\"__metadata__\":{}", 0, "HEADER_JSON", {"not JSON", "byte 3"}},
      {"SecondObject", "{}{}", 0, "HEADER_JSON", {"not JSON"}},
      {"GarbageAfterNul", "{}" + nul + "x", 0, "HEADER_JSON", {"NUL", "after 2 bytes"}},
      {"NulInAName", "{\"a" + nul + "\":{}}", 0, "HEADER_JSON", {"NUL"}},
      {"BadUtf8", "{\"a\xff\":{}}", 0, "HEADER_JSON", {"not JSON"}},
      {"LoneSurrogate", "{\"\\ud800\":{}}", 0, "HEADER_JSON", {"not JSON"}},
      {"NumberOutOfRange", One("F32", "[1e999]", "[0,4]"), 4, "HEADER_JSON", {"not JSON"}},
      {"DeepLists", "{\"a\":" + Repeat("[", 100000), 0, "HEADER_FORM", {"\"a\"", "expected an object", "a list"}},
      {"DeepObjects", Repeat("{\"a\":", 100000), 0, "UNKNOWN_KEY", {"\"a\""}},
      {"DeepShape", "{\"a\":{\"shape\":" + Repeat("[", 100000), 0, "SHAPE", {"\"a\"", "got a list"}},
      {"DeepMetadata", "{\"__metadata__\":{\"a\":{\"a\":{}}}}", 0, "METADATA", {"\"a\"", "expected a string"}},
      {"EntryIsANumber", "{\"a\":1}", 0, "HEADER_FORM", {"\"a\"", "a number"}},
      {"EntryIsNull", "{\"a\":null}", 0, "HEADER_FORM", {"\"a\"", "null"}},
      {"EntryIsEmpty", "{\"a\":{}}", 0, "MISSING_KEY", {"\"a\"", "no dtype"}},
      {"NoShape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "MISSING_KEY", {"no shape"}},
      {"NoOffsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "MISSING_KEY", {"no data_offsets"}},
      {"UnknownKey", "{\"a\":{\"dtype\":\"F32\",\"sparse\":1}}", 4, "UNKNOWN_KEY", {"\"a\"", "\"sparse\""}},
      {"DoubleTensor",
       absl::StrCat("{", Entry("a", "F32", "[1]", "[0,4]"), ",", Entry("a", "F32", "[1]", "[4,8]"), "}"),
       8,
       "DUPLICATE_KEY",
       {"\"a\" twice"}},
      {"DoubleTensorEscaped",
       absl::StrCat("{", Entry("a", "F32", "[1]", "[0,4]"), ",", Entry("\\u0061", "F32", "[1]", "[4,8]"), "}"),
       8,
       "DUPLICATE_KEY",
       {"\"a\" twice"}},
      {"DoubleField", "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 4, "DUPLICATE_KEY", {"\"a\"", "\"dtype\""}},
      {"DoubleMetadata", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "DUPLICATE_KEY", {"\"__metadata__\" twice"}},
      {"DoubleMetadataKey",
       "{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}",
       0,
       "DUPLICATE_KEY",
       {"__metadata__", "\"k\" twice"}},
      {"MetadataIsANumber", "{\"__metadata__\":5}", 0, "METADATA", {"__metadata__", "a number"}},
      {"MetadataIsNull", "{\"__metadata__\":null}", 0, "METADATA", {"__metadata__", "null"}},
      {"MetadataHasANumber",
       "{\"__metadata__\":{\"k\":5}}",
       0,
       "METADATA",
       {"\"k\"", "expected a string, got a number"}},
      {"UnknownDtype", One("ZZ", "[2]", "[9223372036854775808,16]"), 16, "DTYPE", {"\"t\"", "\"ZZ\""}},
      {"LowerCaseDtype", One("f32", "[1]", "[0,4]"), 4, "DTYPE", {"\"f32\""}},
      {"DtypeIsANumber", "{\"a\":{\"dtype\":32}}", 0, "DTYPE", {"expected a string, got a number"}},
      {"DtypeIsAList", "{\"a\":{\"dtype\":[]}}", 0, "DTYPE", {"expected a string, got a list"}},
      {"ShapeIsANumber", One("F32", "1", "[0,4]"), 4, "SHAPE", {"shape", "a number"}},
      {"ShapeIsAString", One("F32", "\"1\"", "[0,4]"), 4, "SHAPE", {"shape", "a string"}},
      {"ShapeOfStrings", One("F32", "[\"1\"]", "[0,4]"), 4, "SHAPE", {"shape", "a string"}},
      {"NegativeDimension", One("F32", "[-1]", "[0,4]"), 4, "SHAPE", {"-1"}},
      {"NegativeZero", One("F32", "[-0]", "[0,0]"), 0, "SHAPE", {"negative"}},
      {"FractionalDimension", One("F32", "[1.0]", "[0,4]"), 4, "SHAPE", {"1.0"}},
      {"ExponentDimension", One("F32", "[1e0]", "[0,4]"), 4, "SHAPE", {"1e0"}},
      {"TrueDimension", One("F32", "[true]", "[0,4]"), 4, "SHAPE", {"true"}},
      {"DimensionOverInt64", One("F32", "[9223372036854775808]", "[0,4]"), 4, "SHAPE", {"9223372036854775808"}},
      {"DimensionOverUint64", One("F32", "[18446744073709551616]", "[0,4]"), 4, "SHAPE", {"18446744073709551616"}},
      {"ShapeOverflow", One("F32", "[" + max + "," + max + "]", "[0,4]"), 4, "SHAPE", {"too many elements", max}},
      {"BitsOverflow", One("F64", "[1152921504606846976]", "[0,0]"), 0, "SHAPE", {"too many elements"}},
      // 2^32 · 2^32 elements would be 0 in 64 bits.
      {"ShapeWrapsToZero", One("I8", "[4294967296,4294967296]", "[0,0]"), 0, "SHAPE", {"too many elements"}},
      {"TooManyDimensions", One("F32", "[" + Repeat("1,", 64) + "1]", "[0,4]"), 4, "SHAPE", {"at most 64 dimensions"}},
      {"OffsetsOfOne", One("F32", "[1]", "[4]"), 4, "OFFSETS", {"expected 2 numbers, got 1"}},
      {"OffsetsOfThree", One("F32", "[1]", "[0,4,4]"), 4, "OFFSETS", {"expected 2 numbers"}},
      {"OffsetsAreAnObject", One("F32", "[1]", "{}"), 4, "OFFSETS", {"an object"}},
      {"NegativeOffset", One("F32", "[1]", "[-4,0]"), 4, "OFFSETS", {"-4"}},
      {"FractionalOffset", One("F32", "[1]", "[0,4.5]"), 4, "OFFSETS", {"4.5"}},
      {"OffsetOverUint64", One("F32", "[1]", "[0,18446744073709551620]"), 4, "OFFSETS", {"18446744073709551620"}},
      {"BackwardOffsets", One("F32", "[1]", "[4,0]"), 4, "OFFSETS", {"end of at least 4, got 0"}},
      {"BackwardHugeOffsets", One("F32", "[1]", "[9223372036854775808,16]"), 16, "OFFSETS", {"9223372036854775808"}},
      {"TooFewBytes", One("F32", "[2]", "[0,4]"), 4, "BYTE_COUNT", {"expected 8 bytes for F32 [2]", "4"}},
      {"TooManyBytes", One("F32", "[1]", "[0,8]"), 8, "BYTE_COUNT", {"expected 4 bytes", "8"}},
      {"HoleAtTheStart", One("F32", "[1]", "[4,8]"), 8, "OFFSETS", {"hole", "from 0, got 4"}},
      {"Hole",
       absl::StrCat("{", Entry("a", "F32", "[1]", "[0,4]"), ",", Entry("b", "F32", "[1]", "[8,12]"), "}"),
       12,
       "OFFSETS",
       {"\"b\"", "hole", "from 4, got 8"}},
      {"Overlap",
       absl::StrCat("{", Entry("a", "F32", "[2]", "[0,8]"), ",", Entry("b", "F32", "[1]", "[4,8]"), "}"),
       8,
       "OFFSETS",
       {"\"b\"", "overlaps", "from 8, got 4"}},
      {"SamePlace",
       absl::StrCat("{", Entry("a", "F32", "[1]", "[0,4]"), ",", Entry("b", "F32", "[1]", "[0,4]"), "}"),
       4,
       "OFFSETS",
       {"overlaps"}},
      {"DataTooLong", One("F32", "[1]", "[0,4]"), 5, "OFFSETS", {"\"t\"", "expected 4 bytes of data, got 5"}},
      {"DataTooShort", One("F32", "[1]", "[0,4]"), 3, "TRUNCATED", {"\"t\"", "expected 4 bytes of data, got 3"}},
      {"DataWithoutTensors", "{}", 1, "OFFSETS", {"no tensor", "expected 0 bytes of data, got 1"}},
  };
}

void PrintTo(const HostileHeader& header, std::ostream* out) { *out << Shortened(header.json); }

class HostileSafetensorsHeader : public ::testing::TestWithParam<HostileHeader> {};

TEST_P(HostileSafetensorsHeader, IsRefusedSayingWhy) {
  const HostileHeader& param = GetParam();
  const auto header = Parse(param.json, param.data_bytes);
  ASSERT_FALSE(header.ok());
  ExpectError(header.status(), kInvalid, "SAFETENSORS_" + param.reason, {"file: \"f\": "});
  for (const std::string& part : param.parts) EXPECT_THAT(std::string(header.status().message()), HasSubstr(part));
}

INSTANTIATE_TEST_SUITE_P(All, HostileSafetensorsHeader, ::testing::ValuesIn(HostileHeaders()),
                         [](const auto& one) { return std::string(one.param.name); });

TEST(SafetensorsHeader, EveryPrefixIsRefused) {
  const std::string json = absl::StrCat("{\"__metadata__\":{\"a\":\"b\"},", Entry("t", "F32", "[1]", "[0,4]"), "}");
  for (size_t length = 0; length < json.size(); ++length) EXPECT_FALSE(Parse(json.substr(0, length), 4).ok()) << length;
  EXPECT_TRUE(Parse(json, 4).ok());
}

TEST(SafetensorsHeader, DamagedBytesNeverCrash) {
  const std::string json = absl::StrCat("{\"__metadata__\":{\"a\":\"b\"},", Entry("t", "F32", "[1,1]", "[0,4]"), ",",
                                        Entry("u", "BF16", "[2]", "[4,8]"), "}");
  std::mt19937 random(1);
  constexpr std::string_view alphabet = "{}[]\",:0123456789-.eE\\utrfn \0\xff"sv;
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = json;
    for (int changes = 1 + static_cast<int>(random() % 4); changes > 0; --changes) {
      damaged[random() % damaged.size()] = alphabet[random() % alphabet.size()];
    }
    const auto header = Parse(damaged, 8);
    if (!header.ok()) {
      EXPECT_EQ(header.status().code(), kInvalid);
    }
  }
}

TEST(SafetensorsHeader, LongNamesAreCutShortInTexts) {
  const auto header = Parse(absl::StrCat("{\"", std::string(20000, 'n'), "\\n\":1}"));
  ASSERT_FALSE(header.ok());
  EXPECT_LT(header.status().message().size(), 400u);
}

TEST(SafetensorsHeader, ControlCharactersAreEscapedInTexts) {
  const auto header = Parse("{\"a\\n\\u001b[31m\":1}");
  ASSERT_FALSE(header.ok());
  EXPECT_EQ(header.status().message().find('\n'), absl::string_view::npos);
  EXPECT_EQ(header.status().message().find('\x1b'), absl::string_view::npos);
}

TEST(SafetensorsFile, MissingFileIsNotFound) {
  const TemporaryFolder folder;
  ExpectError(SafetensorsFile::Open(folder.File("none.safetensors")).status(), absl::StatusCode::kNotFound,
              "FILE_NOT_FOUND", {"none.safetensors", "No such file"});
  ExpectError(SafetensorsFile::Open("").status(), absl::StatusCode::kNotFound, "FILE_NOT_FOUND", {});
}

TEST(SafetensorsFile, FoldersPipesAndDevicesAreRefusedWithoutWaiting) {
  const TemporaryFolder folder;
  ExpectError(SafetensorsFile::Open(folder.path()).status(), kInvalid, "FILE_NOT_REGULAR", {"regular file"});
  ASSERT_EQ(mkfifo(folder.File("pipe").c_str(), 0600), 0);
  ExpectError(SafetensorsFile::Open(folder.File("pipe")).status(), kInvalid, "FILE_NOT_REGULAR", {"pipe"});
  ExpectError(SafetensorsFile::Open("/dev/zero").status(), kInvalid, "FILE_NOT_REGULAR", {"/dev/zero"});
}

TEST(SafetensorsFile, ShortFilesAreRefused) {
  const TemporaryFolder folder;
  for (const size_t length : {0, 1, 7}) {
    ExpectError(SafetensorsFile::Open(folder.Write("s.safetensors", std::string(length, '\0'))).status(), kInvalid,
                "SAFETENSORS_TRUNCATED", {"s.safetensors", "at least 8 bytes", absl::StrCat("got ", length)});
  }
  ExpectError(SafetensorsFile::Open(folder.Write("zero.safetensors", std::string(8, '\0'))).status(), kInvalid,
              "SAFETENSORS_HEADER_JSON", {"zero.safetensors", "'{'"});
}

TEST(SafetensorsFile, HeaderLengthsAreBelievedOnlyWithinTheFile) {
  const TemporaryFolder folder;
  const auto with_length = [&](uint64_t length) {
    std::string bytes(reinterpret_cast<const char*>(&length), 8);
    return SafetensorsFile::Open(folder.Write("h.safetensors", bytes + "{}")).status();
  };
  EXPECT_TRUE(with_length(2).ok());
  ExpectError(with_length(3), kInvalid, "SAFETENSORS_TRUNCATED", {"expected 3 bytes of header, got 2"});
  ExpectError(with_length(100'000'000), kInvalid, "SAFETENSORS_TRUNCATED", {"100000000"});
  ExpectError(with_length(100'000'001), kInvalid, "SAFETENSORS_HEADER_TOO_LARGE", {"100000001"});
  ExpectError(with_length(std::numeric_limits<uint64_t>::max()), kInvalid, "SAFETENSORS_HEADER_TOO_LARGE",
              {"18446744073709551615"});
  ExpectError(with_length(uint64_t{1} << 63), kInvalid, "SAFETENSORS_HEADER_TOO_LARGE", {"9223372036854775808"});
}

TEST(SafetensorsFile, PaddedHeadersOfAnyLengthLoad) {
  const TemporaryFolder folder;
  for (size_t length = 99993; length <= 100008; ++length) {
    std::string json = One("U8", "[3]", "[0,3]");
    json.resize(length, ' ');
    const auto file = SafetensorsFile::Open(folder.Write("p.safetensors", SafetensorsBytes(json, 3)));
    ASSERT_TRUE(file.ok()) << length << file.status();
    EXPECT_EQ(file->tensors().size(), 1u);
  }
}

TEST(SafetensorsFile, ReadsUnalignedTensors) {
  const TemporaryFolder folder;
  // A header of 1 byte more than a multiple of 4, and one byte of another tensor first.
  std::string json = absl::StrCat("{", Entry("x", "U8", "[1]", "[0,1]"), ",", Entry("t", "BF16", "[2]", "[1,5]"), "}");
  json.resize((json.size() + 3) / 4 * 4 + 1, ' ');
  const auto file = SafetensorsFile::Open(folder.Write("u.safetensors", SafetensorsBytes(json, 5)));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tensor = file->Read("t");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype(), DType::kBFloat16);
  EXPECT_EQ(std::memcmp(tensor->data(), "\x01\x02\x03\x04", 4), 0);
}

TEST(SafetensorsFile, UnusableDtypesAreErrorsOnlyWhenRead) {
  const TemporaryFolder folder;
  const auto file = SafetensorsFile::Open(folder.Write(
      "m.safetensors",
      SafetensorsBytes(absl::StrCat("{", Entry("good", "F16", "[1]", "[0,2]"), ",", Entry("ints", "U8", "[2]", "[2,4]"),
                                    ",", Entry("doubles", "F64", "[1]", "[4,12]"), "}"),
                       12)));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->Read("good").ok());
  ExpectError(file->Read("ints").status(), kInvalid, "SAFETENSORS_DTYPE", {"m.safetensors", "\"ints\"", "U8"});
  ExpectError(file->Read("doubles").status(), kInvalid, "SAFETENSORS_DTYPE", {"\"doubles\"", "F64"});
  EXPECT_TRUE(file->ReadDoubles("doubles").ok());
  ExpectError(file->ReadDoubles("ints").status(), kInvalid, "SAFETENSORS_DTYPE", {"\"ints\"", "U8"});
}

TEST(SafetensorsFile, Int8IsReadAndWritten) {
  const TemporaryFolder folder;
  const Tensor ints = Tensor::FromFloats(DType::kInt8, {3}, {-128, 5, 127});
  const Tensor scale = Tensor::FromFloats(DType::kFloat16, {1}, {0.5f});
  ASSERT_TRUE(WriteSafetensors(folder.File("m.safetensors"), {{"a", ints}, {"b", scale}}).ok());
  const auto file = SafetensorsFile::Open(folder.File("m.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Find("a")->dtype, "I8");
  EXPECT_EQ(file->Find("b")->begin, 0u) << "wider elements first, so that all are aligned";
  EXPECT_TRUE(SameBits(*file->Read("a"), ints));
  EXPECT_TRUE(SameBits(*file->Read("b"), scale));
  EXPECT_EQ(*file->ReadDoubles("a"), (std::vector<double>{-128, 5, 127}));
}

TEST(SafetensorsFile, UnknownTensorIsNotFound) {
  const TemporaryFolder folder;
  const auto file = SafetensorsFile::Open(folder.Write("n.safetensors", SafetensorsBytes("{}", 0)));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->Find("x"), nullptr);
  ExpectError(file->Read("x").status(), absl::StatusCode::kNotFound, "TENSOR_NOT_FOUND", {"n.safetensors", "\"x\""});
  ExpectError(file->ReadDoubles(std::string(20000, 'x')).status(), absl::StatusCode::kNotFound, "TENSOR_NOT_FOUND", {});
}

TEST(SafetensorsFile, ShapesThatNoTensorCanHaveAreErrorsWhenRead) {
  const TemporaryFolder folder;
  const auto file = SafetensorsFile::Open(folder.Write(
      "r.safetensors", SafetensorsBytes(absl::StrCat("{", Entry("deep", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), ",",
                                                     Entry("wide", "F32", "[0,9223372036854775807]", "[4,4]"), "}"),
                                        4)));
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectError(file->Read("deep").status(), kInvalid, "SAFETENSORS_SHAPE", {"\"deep\"", "8 dimensions"});
  ExpectError(file->Read("wide").status(), kInvalid, "SAFETENSORS_SHAPE", {"\"wide\""});
  ExpectError(file->ReadDoubles("wide").status(), kInvalid, "SAFETENSORS_SHAPE", {"\"wide\""});
}

TEST(SafetensorsFile, FileThatBecameShorterIsAnError) {
  const TemporaryFolder folder;
  const std::string path = folder.Write("s.safetensors", SafetensorsBytes(One("F32", "[4]", "[0,16]"), 16));
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  ExpectError(file->Read("t").status(), kInvalid, "FILE_TRUNCATED", {"s.safetensors", "shorter"});
}

TEST(SafetensorsFile, KeepsReadingAReplacedFile) {
  const TemporaryFolder folder;
  const std::string path = folder.File("k.safetensors");
  const Tensor before = Tensor::FromFloats(DType::kFloat32, {2}, {1, 2});
  ASSERT_TRUE(WriteSafetensors(path, {{"t", before}}).ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(WriteSafetensors(path, {{"t", Tensor::FromFloats(DType::kFloat32, {2}, {3, 4})}}).ok());
  const SafetensorsFile copy = *file;
  EXPECT_TRUE(SameBits(*copy.Read("t"), before));
}

TEST(WriteSafetensors, WhatIsWrittenIsReadBack) {
  const TemporaryFolder folder;
  const std::string path = folder.File("w.safetensors");
  const std::map<std::string, Tensor> tensors = {
      {"a.half", Tensor::FromFloats(DType::kFloat16, {3}, {1, -2, 0.5})},
      {"b.scalar", Tensor::FromFloats(DType::kFloat32, {}, {7})},
      {"c.empty", Tensor::Allocate(DType::kBFloat16, {0, 5})},
      {"d \"quoted\" \n é", Tensor::FromFloats(DType::kBFloat16, {1, 2}, {3, 4})},
      {"e", Tensor::FromFloats(DType::kFloat32, {2, 2}, {1, -0.0f, std::numeric_limits<float>::infinity(), 1e-45f})},
  };
  ASSERT_TRUE(WriteSafetensors(path, tensors, {{"format", "pt"}, {"note", "\"é\n"}}).ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->path(), path);
  EXPECT_EQ(file->metadata().at("note"), "\"é\n");
  ASSERT_EQ(file->tensors().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto read = file->Read(name);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(SameBits(*read, tensor)) << name;
    // Aligned in the file: the data begins at a multiple of 8.
    EXPECT_EQ(file->Find(name)->begin % SizeOf(tensor.dtype()), 0u) << name;
  }
  uint64_t length;
  const std::string bytes = ReadWhole(path);
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_THAT(*file->ReadDoubles("a.half"), ElementsAre(1, -2, 0.5));
  EXPECT_THAT(*file->ReadDoubles("b.scalar"), ElementsAre(7));
  EXPECT_TRUE(file->ReadDoubles("c.empty")->empty());
}

TEST(SafetensorsHead, HeadAndDataAreTheFile) {
  TemporaryFolder folder;
  const std::map<std::string, Tensor> tensors = {{"a", Tensor::FromFloats(DType::kBFloat16, {3}, {1, 2, 3})},
                                                 {"b", Tensor::FromFloats(DType::kFloat32, {2}, {4, 5})}};
  ASSERT_TRUE(WriteSafetensors(folder.File("f"), tensors, {{"k", "v"}}).ok());
  std::vector<std::pair<std::string, Tensor>> ordered = InFileOrder(tensors);
  ASSERT_EQ(ordered.front().first, "b");
  std::string bytes;
  for (const auto& [name, tensor] : ordered) {
    bytes.append(reinterpret_cast<const char*>(tensor.data()), tensor.num_bytes());
  }
  // The head needs no data.
  for (auto& [name, tensor] : ordered) tensor = Tensor::WithoutData(tensor.dtype(), tensor.shape());
  const auto head = SafetensorsHead(ordered, {{"k", "v"}}, "test");
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->size() % 8, 0u);
  EXPECT_EQ(*head + bytes, ReadWhole(folder.File("f")));
}

TEST(SafetensorsHead, KeepsTheCallersOrder) {
  const auto tensor = Tensor::WithoutData(DType::kFloat16, {2});
  const auto head = SafetensorsHead({{"z", tensor}, {"a", tensor}}, {}, "test");
  ASSERT_TRUE(head.ok()) << head.status();
  const auto header = Parse(head->substr(8), 8);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->tensors.at("z").begin, 0u);
  EXPECT_EQ(header->tensors.at("a").begin, 4u);
  ExpectError(SafetensorsHead({{"__metadata__", tensor}}, {}, "the download").status(), kInvalid, "SAFETENSORS_NAME",
              {"the download", "reserved"});
}

TEST(WriteSafetensors, WithoutTensorsIsAnEmptyFile) {
  const TemporaryFolder folder;
  ASSERT_TRUE(WriteSafetensors(folder.File("e.safetensors"), {}).ok());
  EXPECT_EQ(ReadWhole(folder.File("e.safetensors")), SafetensorsBytes("{}      ", 0));
}

TEST(WriteSafetensors, LargeTensorsComeBackAsDoubles) {
  const TemporaryFolder folder;
  std::vector<float> values(700001);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.25f;
  const Tensor tensor = Tensor::FromFloats(DType::kFloat32, {static_cast<int64_t>(values.size())}, values);
  ASSERT_TRUE(WriteSafetensors(folder.File("l.safetensors"), {{"t", tensor}}).ok());
  const auto file = SafetensorsFile::Open(folder.File("l.safetensors"));
  ASSERT_TRUE(file.ok());
  const auto doubles = file->ReadDoubles("t");
  ASSERT_TRUE(doubles.ok());
  EXPECT_EQ(*doubles, std::vector<double>(values.begin(), values.end()));
}

TEST(WriteSafetensors, NamesThatTheFormatCannotHoldAreRefused) {
  const TemporaryFolder folder;
  const std::string path = folder.File("n.safetensors");
  const Tensor tensor;
  ExpectError(WriteSafetensors(path, {{"__metadata__", tensor}}), kInvalid, "SAFETENSORS_NAME", {"reserved"});
  ExpectError(WriteSafetensors(path, {{"a\xff", tensor}}), kInvalid, "SAFETENSORS_NAME", {"UTF-8"});
  ExpectError(WriteSafetensors(path, {}, {{"k", "\xff"}}), kInvalid, "SAFETENSORS_METADATA", {"\"k\"", "UTF-8"});
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(WriteSafetensors, FailureLeavesTheOldFileAndNothingElse) {
  const TemporaryFolder folder;
  ExpectError(WriteSafetensors(folder.File("no/such/folder.safetensors"), {}), absl::StatusCode::kNotFound,
              "FILE_NOT_FOUND", {"folder.safetensors"});
  ExpectError(WriteSafetensors(folder.path(), {}), kInvalid, "FILE_NOT_REGULAR", {});
  ExpectError(WriteSafetensors("/dev/null", {}), kInvalid, "FILE_NOT_REGULAR", {"/dev/null"});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(WriteSafetensors, SameInputGivesTheSameBytesAndNoOtherFile) {
  const TemporaryFolder folder;
  const Tensor tensor = Tensor::FromFloats(DType::kFloat16, {3}, {1, 2, 3});
  ASSERT_TRUE(WriteSafetensors(folder.File("a"), {{"x", tensor}, {"y", tensor}}, {{"k", "v"}}).ok());
  ASSERT_TRUE(WriteSafetensors(folder.File("b"), {{"y", tensor}, {"x", tensor}}, {{"k", "v"}}).ok());
  EXPECT_EQ(ReadWhole(folder.File("a")), ReadWhole(folder.File("b")));
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) names.push_back(entry.path().filename());
  EXPECT_THAT(names, UnorderedElementsAre("a", "b"));
}

TEST(SafetensorsRealFile, Stories260kInFloat32) {
  LAYERD_TEST_DATA_OR_SKIP(path, "stories260k/stories260k.f32.safetensors");
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().size(), 47u);
  EXPECT_EQ(file->metadata().at("rms_norm_eps"), "1e-5");
  EXPECT_THAT(file->Read("model.layers.0.mlp.gate_proj.weight")->shape(), ElementsAre(172, 64));
  for (const auto& [name, entry] : file->tensors()) {
    const auto tensor = file->Read(name);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->dtype(), DType::kFloat32);
    EXPECT_EQ(tensor->shape(), entry.shape);
  }
}

TEST(SafetensorsRealFile, Stories260kInBFloat16IsTheFloat32FileRounded) {
  LAYERD_TEST_DATA_OR_SKIP(path, "stories260k/stories260k.bf16.safetensors");
  LAYERD_TEST_DATA_OR_SKIP(exact_path, "stories260k/stories260k.f32.safetensors");
  const auto file = SafetensorsFile::Open(path);
  const auto exact = SafetensorsFile::Open(exact_path);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(exact.ok()) << exact.status();
  ASSERT_EQ(file->tensors().size(), 47u);
  for (const auto& [name, entry] : file->tensors()) {
    EXPECT_EQ(entry.dtype, "BF16");
    const auto rounded = file->Read(name);
    const auto full = exact->Read(name);
    ASSERT_TRUE(rounded.ok() && full.ok());
    EXPECT_TRUE(SameBits(*rounded, Tensor::FromFloats(DType::kBFloat16, full->shape(), full->ToFloats()))) << name;
  }
}

TEST(SafetensorsRealFile, EveryFileOfTheDataLoads) {
  LAYERD_TEST_DATA_OR_SKIP(folder, "");
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto file = SafetensorsFile::Open(entry.path());
    ASSERT_TRUE(file.ok()) << file.status();
    ++files;
    for (const auto& [name, tensor] : file->tensors()) {
      if (tensor.dtype == "I32") continue;
      const auto values = file->ReadDoubles(name);
      ASSERT_TRUE(values.ok()) << values.status();
      EXPECT_EQ(static_cast<int64_t>(values->size()), *NumElements(tensor.shape));
    }
  }
  EXPECT_GE(files, 7);
}

TEST(SafetensorsRealFile, Kwt1) {
  LAYERD_TEST_DATA_OR_SKIP(path, "kwt1/kwt1_ffn_norm.f32.safetensors");
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().size(), 96u);
  EXPECT_EQ(file->metadata().at("activation"), "gelu_tanh");
  EXPECT_THAT(file->Read("layers.11.fc1.weight")->shape(), ElementsAre(256, 64));
  EXPECT_THAT(file->Read("layers.11.ln2.bias")->shape(), ElementsAre(64));
}

}  // namespace
}  // namespace layerd
