#include "lib/engine/queued_calls.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>

#include "lib/base/errors.h"
#include "lib/base/shape.h"

namespace layerd {
namespace {

constexpr std::optional<Tensor> FeedForwardOutputs::*kInside[] = {
    &FeedForwardOutputs::gate, &FeedForwardOutputs::up, &FeedForwardOutputs::hidden, &FeedForwardOutputs::normed};

// [..., d] as [rows, d].
Tensor AsRows(const Tensor& tensor, int64_t rows) { return tensor.Reshaped({rows, tensor.shape().back()}); }

// `rows` of them, [rows, width], in the shape of the input that they answer.
Tensor LikeInput(const Tensor& rows, const Tensor& input) {
  Shape shape = input.shape();
  shape.back() = rows.dim(1);
  return rows.Reshaped(std::move(shape));
}

int64_t RowBytes(const Tensor& rows) { return rows.dim(1) * static_cast<int64_t>(SizeOf(rows.dtype())); }

// Copies rows first … first + count − 1 of `from` to row `at` of `to`, which has `all_rows` and is made where it is not.
void PutRows(const Tensor& from, int64_t first, int64_t count, std::optional<Tensor>& to, int64_t at,
             int64_t all_rows) {
  if (!to) to = Tensor::Allocate(from.dtype(), {all_rows, from.dim(1)});
  const int64_t row_bytes = RowBytes(from);
  std::byte* const target = to->mutable_data() + at * row_bytes;
  const std::byte* const source = from.data() + first * row_bytes;
  // A part of a call that says where its output goes is there already.
  if (target != source) std::memcpy(target, source, static_cast<size_t>(count * row_bytes));
}

}  // namespace

BatchTraits TraitsOf(const NormalizeCall&, const BatchSizes&) { return {}; }

BatchTraits TraitsOf(const FeedForwardCall& call, const BatchSizes& sizes) {
  if (call.packed == nullptr) return {};
  const FeedForwardExtent extent = call.packed->extent();
  const int64_t weights =
      extent.dim * extent.hidden_dim * (call.packed->spec().form == FeedForwardForm::kGated ? 2 : 1) +
      extent.hidden_dim * extent.out_dim;
  BatchTraits traits{.heavy = weights >= sizes.heavy_weights && !call.verify};
  const DType input_dtype = call.input.dtype(), output_dtype = call.output_dtype.value_or(input_dtype);
  const bool fits = call.input.rank() > 0 && call.input.shape().back() == extent.dim && call.input.num_elements() > 0 &&
                    IsFloat(input_dtype) && IsFloat(output_dtype);
  if (!fits || call.verify) return traits;
  const double row_bytes = AnswerBytesPerRow(extent, output_dtype, call.intermediates);
  const auto most =
      std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(sizes.limits.max_answer_bytes) / row_bytes));
  const int64_t part = std::min(most, std::max(sizes.batch_rows, sizes.least_part_work / weights));
  traits.kind = BatchKind{call.packed.get(), input_dtype, output_dtype, call.intermediates};
  traits.rows = call.input.num_elements() / extent.dim;
  traits.join_rows = std::min(most, sizes.batch_rows);
  traits.part_rows = traits.rows > part ? part : 0;
  return traits;
}

void QueuedNormalize::Compute(LayerEngine& inner, std::vector<BatchShare>, BatchDone done) {
  PassOn(inner, std::move(call_), std::move(done_), [done = std::move(done)]() mutable { done({}); });
}

void QueuedFeedForward::Compute(LayerEngine& inner, std::vector<BatchShare> shares, BatchDone done) {
  if (shares.size() == 1 && shares[0].rows == all_rows_) {
    PassOn(inner, std::move(call_), std::move(done_), [done = std::move(done)]() mutable { done({}); });
    return;
  }
  Shares mine;
  mine.reserve(shares.size());
  for (auto& [call, rows] : shares) {
    // A kind has calls of this class alone.
    mine.emplace_back(static_cast<QueuedFeedForward*>(call.release()), rows);
  }
  FeedForwardCall joint;
  try {
    joint = JointCall(mine);
  } catch (const std::bad_alloc&) {
    return Answer(std::move(mine), OutOfMemory(), std::move(done));
  }
  inner.FeedForward(std::move(joint),
                    [mine = std::move(mine), done = std::move(done)](absl::StatusOr<FeedForwardResult> result) mutable {
                      Answer(std::move(mine), std::move(result), std::move(done));
                    });
}

FeedForwardCall QueuedFeedForward::JointCall(const Shares& shares) {
  const auto& [first, first_rows] = shares.front();
  FeedForwardCall joint;
  joint.spec = first->call_.spec;
  joint.weights = first->call_.weights;
  joint.packed = first->call_.packed;
  joint.output_dtype = first->call_.output_dtype.value_or(first->call_.input.dtype());
  joint.intermediates = first->call_.intermediates;
  if (shares.size() == 1) {
    joint.input = first->Rows(first_rows);
    joint.context = first->call_.context;
    if (first->call_.output_memory) joint.output_memory = first->OutputOfRows();
    return joint;
  }
  joint.context.deadline = absl::InfinitePast();
  int64_t rows = 0, at = 0;
  for (const auto& [call, count] : shares) {
    joint.context.deadline = std::max(joint.context.deadline, call->call_.context.deadline);
    rows += count;
  }
  std::optional<Tensor> input;
  for (const auto& [call, count] : shares) {
    PutRows(call->Rows(count), 0, count, input, at, rows);
    at += count;
  }
  joint.input = *std::move(input);
  return joint;
}

void QueuedFeedForward::Answer(Shares shares, absl::StatusOr<FeedForwardResult> result, BatchDone done) {
  std::vector<std::unique_ptr<QueuedCall>> again;
  if (result.ok()) {
    int64_t first = 0;
    for (auto& [call, count] : shares) {
      if (!call->Take(*result, first, count)) again.push_back(std::move(call));
      call = nullptr;
      first += count;
    }
  } else if (shares.size() == 1) {
    shares[0].first->Fail(std::move(result).status());
  } else {
    again = TryAgain(shares);
  }
  shares.clear();
  result = absl::UnknownError("answered");  // what they hold is free before the next turn
  done(std::move(again));
}

std::vector<std::unique_ptr<QueuedCall>> QueuedFeedForward::TryAgain(Shares& shares) {
  std::vector<std::unique_ptr<QueuedCall>> again;
  for (auto& [call, count] : shares) {
    if (auto status = CheckContext(call->context()); !status.ok()) {
      call->Fail(std::move(status));
    } else {
      call->traits.kind.reset();
      again.push_back(std::move(call));
    }
  }
  return again;
}

Tensor QueuedFeedForward::Rows(int64_t count) const {
  return AsRows(call_.input, all_rows_).Rows(all_rows_ - traits.rows, count);
}

MemoryPlace QueuedFeedForward::OutputOfRows() const {
  const int64_t row_bytes =
      call_.packed->extent().out_dim * static_cast<int64_t>(SizeOf(call_.output_dtype.value_or(call_.input.dtype())));
  return call_.output_memory->Behind((all_rows_ - traits.rows) * row_bytes);
}

bool QueuedFeedForward::Take(const FeedForwardResult& joint, int64_t first, int64_t count) {
  const FeedForwardOutputs& outputs = joint.outputs;
  const int64_t at = all_rows_ - traits.rows;
  try {
    std::optional<Tensor> output;
    if (at > 0) {
      output = std::move(result_.outputs.output);
    } else if (call_.output_memory) {
      output = Tensor::AllocateAt(&*call_.output_memory, outputs.output.dtype(), {all_rows_, outputs.output.dim(1)});
    }
    PutRows(outputs.output, first, count, output, at, all_rows_);
    result_.outputs.output = *std::move(output);
    for (const auto member : kInside) {
      if (outputs.*member) PutRows(*(outputs.*member), first, count, result_.outputs.*member, at, all_rows_);
    }
  } catch (const std::bad_alloc&) {
    Fail(OutOfMemory());
    return true;
  }
  traits.rows -= count;
  if (traits.rows > 0) return false;
  result_.layer_hash = joint.layer_hash;
  result_.outputs.output = LikeInput(result_.outputs.output, call_.input);
  for (const auto member : kInside) {
    if (auto& inside = result_.outputs.*member) inside = LikeInput(*inside, call_.input);
  }
  done_(std::move(result_));
  return true;
}

}  // namespace layerd
