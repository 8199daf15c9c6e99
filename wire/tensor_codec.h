// Tensors and dtypes between their messages and lib. Both ways, for server and client.
//
// Errors carry field paths relative to the message ("shape", "data"); callers put the rest in front with Under().
// Threads: pure functions.
#ifndef LAYERD_WIRE_TENSOR_CODEC_H_
#define LAYERD_WIRE_TENSOR_CODEC_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "layerd/v1/tensor.pb.h"
#include "lib/base/dtype.h"
#include "lib/base/tensor.h"
#include "wire/message_storage.h"

namespace layerd::wire {

// Most `values` that a tensor may have: they are for people who type, and are converted on the caller's thread.
inline constexpr int kMaxTypedValues = 65536;

absl::StatusOr<DType> DecodeDType(v1::Dtype dtype);
// Nothing for UNSPECIFIED.
absl::StatusOr<std::optional<DType>> DecodeOptionalDType(std::string_view field, v1::Dtype dtype);
v1::Dtype EncodeDType(DType dtype);

// A tensor that shares the bytes in `storage`, that of the message that `tensor` is part of; scattered where they are. One
// in shared memory lies where `storage` says.
// INVALID_ARGUMENT for a dtype, a shape or a count that does not fit; nothing is allocated before the count has been
// checked.
absl::StatusOr<Tensor> DecodeTensor(const v1::Tensor& tensor, const ReceivedStorage& storage);

// Reads `tensor` into `to` where `present`, its errors under the path `field`.
absl::Status DecodeOptionalTensor(std::string_view field, bool present, const v1::Tensor& tensor,
                                  const ReceivedStorage& storage, std::optional<Tensor>& to);

// The elements are copied into the message, or, from kApartBytes on, shared by `storage`; those that lie in memory that
// the receiver has are referred to.
void EncodeTensor(const Tensor& tensor, v1::Tensor& message, SentStorage& storage);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_TENSOR_CODEC_H_
