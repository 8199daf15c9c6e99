#include "lib/engine/call_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

// Estimates of work, in multiply-adds: an element of a norm; a floating-point operation that is done again in float64 by
// plain loops; reading weights, in rows that could be computed meanwhile.
constexpr double kNormWork = 16, kVerifyWork = 64;
constexpr int64_t kPackedRows = 4, kUnpackedRows = 16;

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

absl::StatusOr<CallCost> CheckCall(const NormalizeCall& call, const CallLimits& limits) {
  const auto extent = CheckNormalize(call.spec, call.inputs);
  if (!extent.ok()) return extent.status();
  const int64_t elements = call.inputs.input.num_elements();
  const DType output_dtype = call.output_dtype.value_or(call.inputs.input.dtype());
  const int64_t output_bytes = elements * static_cast<int64_t>(SizeOf(output_dtype));
  if (auto status = CheckOutputMemory(call, output_dtype, output_bytes); !status.ok()) return status;
  // Rows of an output that goes elsewhere may be any number, but a row must be as in any other call.
  double bytes = static_cast<double>(output_bytes);
  if (call.output_memory) bytes = std::min(bytes, Bytes(extent->dim, output_dtype));
  if (call.inputs.residual) bytes += Bytes(elements, call.inputs.input.dtype());
  if (call.intermediates) bytes += 2 * Bytes(elements / extent->group_size, DType::kFloat32);
  if (auto status = CheckAnswer(bytes, limits.max_answer_bytes); !status.ok()) return status;
  const double flops = 4.0 * static_cast<double>(elements);
  if (auto status = CheckVerify(call.verify, flops, limits.max_verify_flops); !status.ok()) return status;
  return CallCost{kNormWork * static_cast<double>(elements) * (call.verify ? kVerifyWork : 1),
                  static_cast<int64_t>(bytes)};
}

absl::StatusOr<CallCost> CheckCall(const FeedForwardCall& call, const CallLimits& limits) {
  const auto extent = CheckFeedForward(call.spec, call.weights, call.input);
  if (!extent.ok()) return extent.status();
  const DType output_dtype = call.output_dtype.value_or(call.input.dtype());
  const int64_t output_bytes = extent->rows * extent->out_dim * static_cast<int64_t>(SizeOf(output_dtype));
  if (auto status = CheckOutputMemory(call, output_dtype, output_bytes); !status.ok()) return status;
  double bytes = static_cast<double>(extent->rows) * AnswerBytesPerRow(*extent, output_dtype, call.intermediates);
  if (call.output_memory) {
    bytes -= std::max(0.0, static_cast<double>(output_bytes) - Bytes(extent->out_dim, output_dtype));
  }
  if (auto status = CheckAnswer(bytes, limits.max_answer_bytes); !status.ok()) return status;
  const double flops = FeedForwardFlops(call.spec, *extent);
  if (auto status = CheckVerify(call.verify, flops, limits.max_verify_flops); !status.ok()) return status;
  const auto answer_bytes = static_cast<int64_t>(bytes);
  if (call.verify) return CallCost{flops * kVerifyWork, answer_bytes};
  FeedForwardExtent fetched = *extent;  // what a product costs before its first row
  fetched.rows = call.packed != nullptr ? kPackedRows : kUnpackedRows;
  return CallCost{(flops + FeedForwardFlops(call.spec, fetched)) / 2, answer_bytes};
}

double AnswerBytesPerRow(const FeedForwardExtent& extent, DType output_dtype, bool intermediates) {
  return Bytes(extent.out_dim, output_dtype) + (intermediates ? 4 * Bytes(extent.hidden_dim, DType::kFloat32) : 0.0);
}

}  // namespace layerd
