#include "lib/engine/call_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

absl::Status CheckAnswer(double bytes, int64_t max_bytes) {
  if (bytes <= static_cast<double>(max_bytes)) return absl::OkStatus();
  return TooLarge("input.shape", "ANSWER_TOO_LARGE",
                  absl::StrCat("expected an answer of at most ", max_bytes, " bytes (--max_message_mib), got ",
                               static_cast<int64_t>(std::min(bytes, 9e18)), " bytes"));
}

absl::Status CheckVerify(bool verify, double flops, double max_flops) {
  if (!verify || flops <= max_flops) return absl::OkStatus();
  return TooLarge("verify", "VERIFY_TOO_LARGE",
                  absl::StrCat("expected a layer of at most ", max_flops,
                               " floating-point operations to verify (--max_verify_flops), got ", flops));
}

double Bytes(int64_t elements, DType dtype) {
  return static_cast<double>(elements) * static_cast<double>(SizeOf(dtype));
}

}  // namespace

absl::Status CheckCall(const NormalizeCall& call, const CallLimits& limits) {
  const auto extent = CheckNormalize(call.spec, call.inputs);
  if (!extent.ok()) return extent.status();
  const int64_t elements = call.inputs.input.num_elements();
  double bytes = Bytes(elements, call.output_dtype.value_or(call.inputs.input.dtype()));
  if (call.inputs.residual) bytes += Bytes(elements, call.inputs.input.dtype());
  if (call.intermediates) bytes += 2 * Bytes(elements / extent->group_size, DType::kFloat32);
  if (auto status = CheckAnswer(bytes, limits.max_answer_bytes); !status.ok()) return status;
  return CheckVerify(call.verify, 4.0 * static_cast<double>(elements), limits.max_verify_flops);
}

absl::Status CheckCall(const FeedForwardCall& call, const CallLimits& limits) {
  const auto extent = CheckFeedForward(call.spec, call.weights, call.input);
  if (!extent.ok()) return extent.status();
  const double bytes = static_cast<double>(extent->rows) *
                       AnswerBytesPerRow(*extent, call.output_dtype.value_or(call.input.dtype()), call.intermediates);
  if (auto status = CheckAnswer(bytes, limits.max_answer_bytes); !status.ok()) return status;
  return CheckVerify(call.verify, FeedForwardFlops(call.spec, *extent), limits.max_verify_flops);
}

double AnswerBytesPerRow(const FeedForwardExtent& extent, DType output_dtype, bool intermediates) {
  return Bytes(extent.out_dim, output_dtype) + (intermediates ? 4 * Bytes(extent.hidden_dim, DType::kFloat32) : 0.0);
}

}  // namespace layerd
