#include "lib/weights/npy.h"

#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lib/base/errors.h"
#include "lib/weights/file_io.h"

namespace layerd {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr uint64_t kVersionEnd = 8;  // magic, major, minor

absl::Status Damaged(std::string_view source, std::string_view reason, const std::string& text) {
  return InvalidField("file", absl::StrCat("NPY_", std::string(reason)), absl::StrCat(std::string(source), ": ", text));
}

struct NpyHeader {
  std::string descr;
  bool fortran_order = false;
  Shape shape;
};

// Parses {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }: the three keys in any order, each once. Every
// method returns false to stop; error() then says what was expected, and where.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  const std::string& error() const { return error_; }
  NpyHeader& header() { return header_; }

  bool Parse() {
    if (!Expect('{')) return false;
    bool has_descr = false, has_order = false, has_shape = false;
    while (!Next('}')) {
      std::string key;
      if (!String("a key in quotes, or '}'", &key) || !Expect(':')) return false;
      bool* has = key == "descr"           ? &has_descr
                  : key == "fortran_order" ? &has_order
                  : key == "shape"         ? &has_shape
                                           : nullptr;
      if (has == nullptr) {
        return Fail(absl::StrCat("the keys descr, fortran_order and shape, got ", Quoted(key)));
      }
      if (*has) return Fail(absl::StrCat("each key once, got ", Quoted(key), " again"));
      *has = true;
      const bool parsed = has == &has_descr
                              ? String("one dtype in quotes as descr (structured dtypes are not read)", &header_.descr)
                          : has == &has_order ? Bool(&header_.fortran_order)
                                              : Tuple(&header_.shape);
      if (!parsed) return false;
      if (!Next(',')) {
        if (!Expect('}')) return false;
        break;
      }
    }
    if (!has_descr || !has_order || !has_shape) {
      return Fail(absl::StrCat("the key ", !has_descr ? "descr" : !has_order ? "fortran_order" : "shape"));
    }
    SkipSpace();
    return at_ == text_.size() || Fail("nothing after '}' but spaces and a newline");
  }

 private:
  bool Fail(const std::string& expected) {
    error_ = absl::StrCat("the header: expected ", expected, ", after ", at_, " bytes");
    return false;
  }

  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }

  // Takes `c` if it comes next.
  bool Next(char c) {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  bool Expect(char c) { return Next(c) || Fail(absl::StrCat("'", std::string(1, c), "'")); }

  bool String(const std::string& expected, std::string* out) {
    SkipSpace();
    if (at_ == text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return Fail(expected);
    const size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return Fail("the string to end");
    const std::string_view body = text_.substr(at_ + 1, end - at_ - 1);
    if (body.find('\\') != std::string_view::npos) return Fail("a string without escapes");
    *out = std::string(body);
    at_ = end + 1;
    return true;
  }

  bool Bool(bool* out) {
    SkipSpace();
    for (const std::string_view word : {std::string_view("True"), std::string_view("False")}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      *out = word == "True";
      return true;
    }
    return Fail("True or False as fortran_order");
  }

  bool Tuple(Shape* out) {
    if (!Next('(')) return Fail("a tuple as shape");
    bool comma = true;
    while (!Next(')')) {
      if (!comma) return Fail("',' or ')'");
      int64_t dimension = 0;
      if (!Number(&dimension)) return false;
      out->push_back(dimension);
      comma = Next(',');
    }
    // In Python, (3) is a number.
    return out->size() != 1 || comma || Fail("a tuple as shape, not a number in parentheses");
  }

  bool Number(int64_t* out) {
    SkipSpace();
    const size_t begin = at_;
    int64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{text_[at_] - '0'}, &value)) {
        return Fail("a dimension below 2^63");
      }
    }
    if (at_ == begin) return Fail("a dimension of 0 or more");
    if (text_[begin] == '0' && at_ != begin + 1) return Fail("a dimension without leading zeros");
    *out = value;
    return true;
  }

  const std::string_view text_;
  size_t at_ = 0;
  NpyHeader header_;
  std::string error_;
};

absl::StatusOr<DType> ParseDescr(const std::string& descr, std::string_view source) {
  if (descr == "<f4") return DType::kFloat32;
  if (descr == "<f2") return DType::kFloat16;
  if (descr == "|i1") return DType::kInt8;
  std::string advice = "convert it with array.astype('<f4')";
  if (descr == "<f8" || descr == ">f8") advice = "float64 is not read: convert it with array.astype('<f4')";
  if (descr == ">f4" || descr == ">f2") advice = "big-endian is not read: convert it with array.astype('<f4')";
  if (descr == "<V2" || descr == "|V2") advice = "bfloat16 has no .npy dtype: use .safetensors";
  return Damaged(
      source, "DTYPE",
      absl::StrCat("expected the dtype '<f4', '<f2' or, of weights, '|i1', got ", Quoted(descr), "; ", advice));
}

// `from` holds the elements of `to` in Fortran order: the first index runs fastest.
void CopyFromFortranOrder(const std::vector<std::byte>& from, Tensor* to) {
  const size_t element = SizeOf(to->dtype());
  const int rank = to->rank();
  std::vector<int64_t> strides(rank, 1), index(rank, 0);
  for (int axis = 1; axis < rank; ++axis) strides[axis] = strides[axis - 1] * to->dim(axis - 1);
  int64_t source = 0;
  for (int64_t i = 0; i < to->num_elements(); ++i) {
    std::memcpy(to->mutable_data() + i * element, from.data() + source * element, element);
    for (int axis = rank - 1; axis >= 0; --axis) {
      source += strides[axis];
      if (++index[axis] < to->dim(axis)) break;
      source -= strides[axis] * to->dim(axis);
      index[axis] = 0;
    }
  }
}

}  // namespace

absl::StatusOr<Tensor> ReadNpy(const std::string& path) {
  const auto file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  const std::string source = Quoted(BaseName(path));
  const auto truncated = [&](uint64_t expected) {
    return Damaged(
        source, "TRUNCATED",
        absl::StrCat("the file ends within its header: expected at least ", expected, " bytes, got ", file->size()));
  };

  unsigned char start[kVersionEnd];
  if (file->size() < sizeof(start)) return truncated(sizeof(start));
  absl::Status read = file->ReadAt(0, absl::MakeSpan(reinterpret_cast<std::byte*>(start), sizeof(start)));
  if (!read.ok()) return read;
  if (std::memcmp(start, kMagic.data(), kMagic.size()) != 0) {
    return Damaged(source, "MAGIC", "this is no .npy file: expected it to begin with \\x93NUMPY");
  }
  const int major = start[6], minor = start[7];
  if (major < 1 || major > 3 || minor != 0) {
    return Damaged(source, "VERSION", absl::StrCat("expected version 1.0, 2.0 or 3.0, got ", major, ".", minor));
  }
  // The length is 2 bytes in version 1, 4 bytes later; little-endian, as we are.
  const uint64_t header_start = kVersionEnd + (major == 1 ? 2 : 4);
  if (file->size() < header_start) return truncated(header_start);
  uint32_t header_bytes = 0;
  read = file->ReadAt(kVersionEnd,
                      absl::MakeSpan(reinterpret_cast<std::byte*>(&header_bytes), header_start - kVersionEnd));
  if (!read.ok()) return read;
  if (header_bytes > kMaxNpyHeaderBytes) {
    return Damaged(
        source, "HEADER",
        absl::StrCat("the header is too long: expected at most ", kMaxNpyHeaderBytes, " bytes, got ", header_bytes));
  }
  const uint64_t data_start = header_start + header_bytes;
  if (file->size() < data_start) return truncated(data_start);
  std::string text(header_bytes, ' ');
  read = file->ReadAt(header_start, absl::MakeSpan(reinterpret_cast<std::byte*>(text.data()), text.size()));
  if (!read.ok()) return read;

  HeaderParser parser(text);
  if (!parser.Parse()) return Damaged(source, "HEADER", parser.error());
  const NpyHeader& header = parser.header();
  const auto dtype = ParseDescr(header.descr, source);
  if (!dtype.ok()) return dtype.status();
  const auto elements = NumElements(header.shape);
  if (!elements.ok())
    return Damaged(source, "SHAPE", absl::StrCat("shape: ", std::string(elements.status().message())));
  const uint64_t expected = static_cast<uint64_t>(*elements) * SizeOf(*dtype);
  if (file->size() - data_start != expected) {
    return Damaged(source, "BYTE_COUNT",
                   absl::StrCat("expected ", expected, " bytes of data for ", std::string(Name(*dtype)), " ",
                                ToString(header.shape), ", got ", file->size() - data_start));
  }

  Tensor tensor = Tensor::Allocate(*dtype, header.shape);
  if (!header.fortran_order || tensor.rank() < 2) {
    read = file->ReadAt(data_start, absl::MakeSpan(tensor.mutable_data(), tensor.num_bytes()));
    if (!read.ok()) return read;
    return tensor;
  }
  std::vector<std::byte> columns(tensor.num_bytes());
  read = file->ReadAt(data_start, absl::MakeSpan(columns));
  if (!read.ok()) return read;
  CopyFromFortranOrder(columns, &tensor);
  return tensor;
}

absl::Status WriteNpy(const std::string& path, const Tensor& tensor) {
  if (tensor.dtype() == DType::kBFloat16) {
    return Damaged(Quoted(BaseName(path)), "DTYPE",
                   "bfloat16 has no .npy dtype: write a .safetensors file, or float32");
  }
  const char* descr = tensor.dtype() == DType::kFloat32 ? "<f4" : tensor.dtype() == DType::kInt8 ? "|i1" : "<f2";
  std::string dict = absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (",
                                  absl::StrJoin(tensor.shape(), ", "), tensor.rank() == 1 ? ",), }" : "), }");
  // NumPy ends the header with a newline and lets the data begin at a multiple of 64.
  const size_t before = kVersionEnd + 2;
  const size_t data_start = (before + dict.size() + 1 + 63) / 64 * 64;
  dict.resize(data_start - before - 1, ' ');
  dict += '\n';
  std::string head(kMagic);
  head += {1, 0, static_cast<char>(dict.size() & 0xff), static_cast<char>(dict.size() >> 8)};
  head += dict;
  return ReplaceFile(path,
                     {absl::MakeSpan(reinterpret_cast<const std::byte*>(head.data()), head.size()), tensor.bytes()});
}

}  // namespace layerd
