#include "wire/tensor_codec.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/shape.h"

namespace layerd::wire {
namespace {

constexpr char kDTypes[] = "DTYPE_FLOAT32, DTYPE_FLOAT16, DTYPE_BFLOAT16 or, for matrices with scales, DTYPE_INT8";

// What is rounded to a float's dtype is what was meant; an int8 that is none is a mistake.
absl::Status CheckInt8(absl::Span<const float> values) {
  for (const float value : values) {
    if (RoundTo(DType::kInt8, value) == value) continue;
    return InvalidField("values", "OUT_OF_RANGE",
                        absl::StrCat("expected whole numbers of -128 to 127 for DTYPE_INT8, got ", value));
  }
  return absl::OkStatus();
}

// The tensor that lies at `place`.
absl::StatusOr<Tensor> ShareTensor(DType dtype, Shape shape, int64_t elements, const MemoryPlace* place) {
  if (place == nullptr) {
    return InvalidField("shared_memory", "UNEXPECTED_FIELD", "expected data, got a place in memory that is not shared");
  }
  const int64_t bytes = elements * static_cast<int64_t>(SizeOf(dtype));
  if (bytes > place->bytes) {
    return InvalidField("shared_memory", "OUT_OF_RANGE",
                        absl::StrCat("expected ", bytes, " bytes for ", std::string(Name(dtype)), " ", ToString(shape),
                                     " from the offset to the region's end, got ", place->bytes));
  }
  return Tensor::AllocateAt(place, dtype, std::move(shape));
}

}  // namespace

absl::StatusOr<DType> DecodeDType(v1::Dtype dtype) {
  switch (dtype) {
    case v1::DTYPE_FLOAT32:
      return DType::kFloat32;
    case v1::DTYPE_FLOAT16:
      return DType::kFloat16;
    case v1::DTYPE_BFLOAT16:
      return DType::kBFloat16;
    case v1::DTYPE_INT8:
      return DType::kInt8;
    case v1::DTYPE_UNSPECIFIED:
      return MissingField("dtype", absl::StrCat("expected ", kDTypes, ", got nothing"));
    default:
      break;
  }
  return InvalidField("dtype", "UNKNOWN_ENUM_VALUE",
                      absl::StrCat("expected ", kDTypes, ", got the unknown value ", static_cast<int>(dtype)));
}

absl::StatusOr<std::optional<DType>> DecodeOptionalDType(std::string_view field, v1::Dtype dtype) {
  if (dtype == v1::DTYPE_UNSPECIFIED) return std::optional<DType>();
  const auto decoded = DecodeDType(dtype);
  if (decoded.ok()) return std::optional<DType>(*decoded);
  // The path of an enum field is the field itself, not a "dtype" inside it.
  const std::string text(decoded.status().message());
  return InvalidField(field, DetailsOf(decoded.status()).reason, text.substr(text.find(": ") + 2));
}

v1::Dtype EncodeDType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::DTYPE_FLOAT32;
    case DType::kFloat16:
      return v1::DTYPE_FLOAT16;
    case DType::kBFloat16:
      return v1::DTYPE_BFLOAT16;
    case DType::kInt8:
      return v1::DTYPE_INT8;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::StatusOr<Tensor> DecodeTensor(const v1::Tensor& tensor, const ReceivedStorage& storage) {
  const auto dtype = DecodeDType(tensor.dtype());
  if (!dtype.ok()) return dtype.status();
  const absl::Span<const int64_t> dims(tensor.shape().data(), tensor.shape().size());
  const auto elements = NumElements(dims);
  if (!elements.ok()) return Under("shape", elements.status());
  Shape shape(dims.begin(), dims.end());
  const ReceivedStorage::Apart* apart = storage.Find(tensor);
  if (tensor.has_shared_memory()) {
    if (apart != nullptr || !tensor.data().empty() || tensor.values_size() > 0) {
      return InvalidField("shared_memory", "TWO_SOURCES", "expected data, values or shared_memory, got two of them");
    }
    return ShareTensor(*dtype, std::move(shape), *elements, storage.FindShared(tensor.shared_memory()));
  }
  if (tensor.values_size() == 0) {
    if (apart != nullptr) return Tensor::AdoptPieces(*dtype, std::move(shape), apart->owner, apart->elements);
    const auto* bytes = reinterpret_cast<const std::byte*>(tensor.data().data());
    return Tensor::Adopt(*dtype, std::move(shape), storage.message(), absl::MakeConstSpan(bytes, tensor.data().size()));
  }
  size_t data_bytes = tensor.data().size();
  if (apart != nullptr) {
    for (const auto& piece : apart->elements) data_bytes += piece.size();
  }
  if (data_bytes > 0) {
    return InvalidField("values", "TWO_SOURCES",
                        absl::StrCat("expected data or values, got both (", data_bytes, " bytes and ",
                                     tensor.values_size(), " values)"));
  }
  if (tensor.values_size() > kMaxTypedValues) {
    return InvalidField("values", "TOO_MANY_VALUES",
                        absl::StrCat("expected at most ", kMaxTypedValues, " values, got ", tensor.values_size(),
                                     "; send larger tensors as data"));
  }
  if (tensor.values_size() != *elements) {
    return InvalidField("values", "VALUE_COUNT_MISMATCH",
                        absl::StrCat("expected ", *elements, " values for the shape ", ToString(shape), ", got ",
                                     tensor.values_size()));
  }
  const auto values = absl::MakeConstSpan(tensor.values().data(), tensor.values().size());
  if (*dtype == DType::kInt8) {
    if (auto status = CheckInt8(values); !status.ok()) return status;
  }
  return Tensor::FromFloats(*dtype, std::move(shape), values);
}

absl::Status DecodeOptionalTensor(std::string_view field, bool present, const v1::Tensor& tensor,
                                  const ReceivedStorage& storage, std::optional<Tensor>& to) {
  if (!present) return absl::OkStatus();
  auto decoded = DecodeTensor(tensor, storage);
  if (!decoded.ok()) return Under(field, decoded.status());
  to = *std::move(decoded);
  return absl::OkStatus();
}

void EncodeTensor(const Tensor& tensor, v1::Tensor& message, SentStorage& storage) {
  message.set_dtype(EncodeDType(tensor.dtype()));
  message.mutable_shape()->Assign(tensor.shape().begin(), tensor.shape().end());
  if (!tensor.is_scattered()) {
    if (auto reference = storage.ReferenceTo(tensor.bytes())) {
      *message.mutable_shared_memory() = *std::move(reference);
      return;
    }
  }
  if (tensor.num_bytes() >= kApartBytes) {
    storage.Add(message, tensor);
  } else {
    message.set_data(reinterpret_cast<const char*>(tensor.data()), tensor.num_bytes());
  }
}

}  // namespace layerd::wire
