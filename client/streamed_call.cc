#include "client/streamed_call.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/remote_engine.h"
#include "lib/base/errors.h"
#include "lib/reference/error_report.h"

namespace layerd {
namespace {

// Of a stream whose layer is replaced meanwhile.
constexpr int kAttempts = 3;

bool IsCancelled(const CallContext& context) {
  return context.cancelled && context.cancelled->load(std::memory_order_relaxed);
}

// The rows of a tensor: all axes but the last `row_axes` count them.
struct Division {
  int64_t rows;
  Shape leading;
  Shape row;

  Shape ShapeOf(int64_t count) const {
    Shape shape = row;
    shape.insert(shape.begin(), count);
    return shape;
  }
};

std::optional<Division> Divide(const Tensor& tensor, int64_t row_axes) {
  if (row_axes < 1 || row_axes > tensor.rank() || tensor.num_elements() == 0) return std::nullopt;
  const auto begin = tensor.shape().begin(), middle = tensor.shape().end() - row_axes;
  Division division{1, {begin, middle}, {middle, tensor.shape().end()}};
  for (const int64_t dim : division.leading) division.rows *= dim;
  if (division.rows > kMaxDimension) return std::nullopt;
  return division;
}

// What NormalizeCall and FeedForwardCall differ in.
struct OfNormalize {
  using Stream = NormalizeStreamKind;
  using Outputs = NormalizeOutputs;
  // Parts of an answer beside the output, and whether they have the input's leading axes; others count rows by one
  // axis.
  static constexpr std::pair<std::optional<Tensor> Outputs::*, bool> kParts[] = {
      {&Outputs::residual_sum, true}, {&Outputs::inverse_rms, false}, {&Outputs::mean, false}};

  static const Tensor& InputOf(const NormalizeCall& call) { return call.inputs.input; }
  // A layer that is kept normalises one axis.
  static int64_t RowAxes(const NormalizeCall& call) {
    return call.layer.empty() ? call.spec.normalized_axes : call.said.normalized_axes.value_or(1);
  }
  static std::vector<const Tensor*> RowTensors(const NormalizeCall& call) {
    std::vector<const Tensor*> tensors = {&call.inputs.input};
    for (const auto* other : {&call.inputs.residual, &call.inputs.gate}) {
      if (*other) tensors.push_back(&**other);
    }
    return tensors;
  }
  static NormalizeChunk Rows(const NormalizeCall& call, const Division& division, int64_t begin, int64_t count) {
    const auto some = [&](const Tensor& tensor) {
      return tensor.Reshaped(division.ShapeOf(division.rows)).Rows(begin, count);
    };
    NormalizeChunk rows{.input = some(call.inputs.input)};
    if (call.inputs.residual) rows.residual = some(*call.inputs.residual);
    if (call.inputs.gate) rows.gate = some(*call.inputs.gate);
    return rows;
  }
  static void SetRows(NormalizeChunk rows, NormalizeCall& call) {
    call.inputs.input = std::move(rows.input);
    call.inputs.residual = std::move(rows.residual);
    call.inputs.gate = std::move(rows.gate);
  }
};

struct OfFeedForward {
  using Stream = FeedForwardStreamKind;
  using Outputs = FeedForwardOutputs;
  static constexpr std::pair<std::optional<Tensor> Outputs::*, bool> kParts[] = {
      {&Outputs::gate, true}, {&Outputs::up, true}, {&Outputs::hidden, true}, {&Outputs::normed, true}};

  static const Tensor& InputOf(const FeedForwardCall& call) { return call.input; }
  static int64_t RowAxes(const FeedForwardCall& /*call*/) { return 1; }
  static std::vector<const Tensor*> RowTensors(const FeedForwardCall& call) { return {&call.input}; }
  static FeedForwardChunk Rows(const FeedForwardCall& call, const Division& division, int64_t begin, int64_t count) {
    return {call.input.Reshaped(division.ShapeOf(division.rows)).Rows(begin, count)};
  }
  static void SetRows(FeedForwardChunk rows, FeedForwardCall& call) { call.input = std::move(rows.input); }
};

// Puts the answers to some rows at a time together.
template <typename Of>
class Whole {
 public:
  using Result = typename Of::Stream::Result;

  explicit Whole(const Division& division) : division_(division) {}

  // `answer` is that to no rows: it tells what a row of each part is like, and has what all rows share.
  absl::Status Begin(Result answer) {
    whole_ = std::move(answer);
    absl::Status status = Allocate(whole_.outputs.output, 1);
    ForEachPart([&](auto member, bool) {
      std::optional<Tensor>& part = whole_.outputs.*member;
      if (part && status.ok()) status = Allocate(*part, kCounted);
    });
    return status;
  }

  // What a server counts for a row of an answer, at most.
  int64_t row_bytes() const { return row_bytes_; }

  // The next `count` rows.
  absl::Status Add(const Result& answer, int64_t count) {
    if (answer.layer_hash != whole_.layer_hash) return MalformedAnswer("is another layer's than the one before it");
    if (answer.report.has_value() != whole_.report.has_value()) {
      return MalformedAnswer("has no report, or one too many");
    }
    if (answer.report) Merge(*answer.report, *whole_.report);
    absl::Status status = Copy(answer.outputs.output, count, whole_.outputs.output);
    ForEachPart([&](auto member, bool) {
      const std::optional<Tensor>& part = answer.outputs.*member;
      std::optional<Tensor>& to = whole_.outputs.*member;
      if (!status.ok()) return;
      if (part.has_value() != to.has_value()) {
        status = MalformedAnswer("has other tensors than the one before it");
      } else if (part) {
        status = Copy(*part, count, *to);
      }
    });
    done_ += count;
    return status;
  }

  // When all rows were added.
  Result Take() {
    whole_.outputs.output = WithLeadingAxes(whole_.outputs.output);
    ForEachPart([&](auto member, bool has_leading_axes) {
      std::optional<Tensor>& part = whole_.outputs.*member;
      if (part && has_leading_axes) part = WithLeadingAxes(*part);
    });
    return std::move(whole_);
  }

 private:
  // A server that judges the size of an answer beforehand may count twice the values inside that there will be.
  static constexpr int64_t kCounted = 2;

  template <typename Visit>
  static void ForEachPart(Visit visit) {
    for (const auto& [member, has_leading_axes] : Of::kParts) visit(member, has_leading_axes);
  }

  // Makes of `part`, which has no rows, one that has room for all, and which is counted `times`.
  absl::Status Allocate(Tensor& part, int64_t times) {
    Shape shape = part.shape();
    if (shape.empty() || shape[0] != 0) {
      return MalformedAnswer(absl::StrCat("to no rows has the shape ", ToString(shape)));
    }
    shape[0] = division_.rows;
    const auto elements = NumElements(shape);
    if (!elements.ok()) return MalformedAnswer(absl::StrCat("has ", elements.status().message()));
    part = Tensor::Allocate(part.dtype(), std::move(shape));
    row_bytes_ += times * static_cast<int64_t>(part.num_bytes()) / division_.rows;
    return absl::OkStatus();
  }

  absl::Status Copy(const Tensor& part, int64_t count, Tensor& to) {
    Shape expected = to.shape();
    expected[0] = count;
    if (part.dtype() != to.dtype() || part.shape() != expected) {
      return MalformedAnswer(absl::StrCat("has a tensor ", std::string(Name(part.dtype())), " ", ToString(part.shape()),
                                          ", expected ", std::string(Name(to.dtype())), " ", ToString(expected)));
    }
    if (part.num_elements() == 0) return absl::OkStatus();
    std::byte* const place = to.mutable_data() + to.num_bytes() / static_cast<size_t>(to.dim(0)) * done_;
    const std::byte* const from = part.Read(0, part.num_elements(), place);
    if (from != place) std::memcpy(place, from, part.num_bytes());
    return absl::OkStatus();
  }

  Tensor WithLeadingAxes(const Tensor& tensor) const {
    Shape shape = division_.leading;
    shape.insert(shape.end(), tensor.shape().begin() + 1, tensor.shape().end());
    return tensor.Reshaped(std::move(shape));
  }

  const Division& division_;
  Result whole_;
  int64_t row_bytes_ = 0;
  int64_t done_ = 0;
};

// The next answer of `stream`; an error where there is none.
template <typename Kind>
absl::StatusOr<typename Kind::Result> Next(RowStream<Kind>& stream) {
  auto answer = stream.Read();
  if (!answer.ok()) return answer.status();
  if (!answer->has_value()) return MalformedAnswer("ends before all rows were answered");
  return **std::move(answer);
}

template <typename Of>
absl::StatusOr<typename Of::Stream::Result> Try(const std::shared_ptr<grpc::Channel>& channel,
                                                const typename Of::Stream::Call& call, const Division& division,
                                                int64_t chunk_bytes) {
  // The call goes first, without rows: so its weights may be as large as a message can be, what is wrong with it is
  // told before rows are sent, and its answer tells how many rows fit in one.
  typename Of::Stream::Call first = call;
  Of::SetRows(Of::Rows(call, division, 0, 0), first);
  RowStream<typename Of::Stream> stream(channel, first);
  auto answer = Next(stream);
  if (!answer.ok()) return answer.status();
  Whole<Of> whole(division);
  if (auto status = whole.Begin(*std::move(answer)); !status.ok()) return status;
  const int64_t row_bytes = std::max(DivisibleBytes(call) / division.rows, whole.row_bytes());
  const int64_t step = std::max<int64_t>(1, std::min(chunk_bytes, kMostRowBytes) / row_bytes);
  for (int64_t sent = 0, got = 0; got < division.rows;) {
    while (sent < division.rows && sent - got < kMostUnanswered * step) {
      const int64_t count = std::min(step, division.rows - sent);
      if (!stream.Write(Of::Rows(call, division, sent, count))) break;  // the next answer tells why
      sent += count;
    }
    if (sent == division.rows) stream.WritesDone();
    if (IsCancelled(call.context)) return CancelledWhileWaiting();
    answer = Next(stream);
    if (!answer.ok()) return answer.status();
    const int64_t count = std::min(step, division.rows - got);
    if (auto status = whole.Add(*answer, count); !status.ok()) return status;
    got += count;
  }
  if (auto status = stream.Finish(); !status.ok()) return status;
  return whole.Take();
}

// An error that tells the shape of the call without rows tells that of the call.
absl::Status OfWholeCall(const absl::Status& status, const Tensor& input, const Division& division) {
  const ErrorDetails details = DetailsOf(status);
  if (details.field.rfind("input", 0) != 0) return status;
  const std::string text(status.message());
  return WithDetails(status.code(),
                     absl::StrReplaceAll(text, {{ToString(division.ShapeOf(0)), ToString(input.shape())}}), details);
}

template <typename Of>
int64_t BytesOf(const typename Of::Stream::Call& call) {
  const auto division = Divide(Of::InputOf(call), Of::RowAxes(call));
  if (!division) return 0;
  int64_t bytes = 0;
  for (const Tensor* tensor : Of::RowTensors(call)) {
    if (tensor->dtype() != Of::InputOf(call).dtype() || tensor->shape() != Of::InputOf(call).shape()) return 0;
    bytes += static_cast<int64_t>(tensor->num_bytes());
  }
  return bytes / division->rows <= kMostRowBytes ? bytes : 0;
}

template <typename Of>
absl::StatusOr<typename Of::Stream::Result> Stream(const std::shared_ptr<grpc::Channel>& channel,
                                                   const typename Of::Stream::Call& call, int64_t chunk_bytes) {
  const auto division = Divide(Of::InputOf(call), Of::RowAxes(call));
  if (!division) return InternalError("a call that cannot be divided was to be streamed");
  for (int attempt = 1;; ++attempt) {
    if (IsCancelled(call.context)) return CancelledWhileWaiting();
    try {
      auto result = Try<Of>(channel, call, *division, chunk_bytes);
      if (result.ok()) return result;
      if (DetailsOf(result.status()).reason != "LAYER_CHANGED" || attempt == kAttempts) {
        return OfWholeCall(result.status(), Of::InputOf(call), *division);
      }
    } catch (const std::bad_alloc&) {
      return OutOfMemory();
    }
  }
}

}  // namespace

int64_t DivisibleBytes(const NormalizeCall& call) { return BytesOf<OfNormalize>(call); }
int64_t DivisibleBytes(const FeedForwardCall& call) { return BytesOf<OfFeedForward>(call); }

absl::StatusOr<NormalizeResult> CallByStream(const std::shared_ptr<grpc::Channel>& channel, const NormalizeCall& call,
                                             int64_t chunk_bytes) {
  return Stream<OfNormalize>(channel, call, chunk_bytes);
}

absl::StatusOr<FeedForwardResult> CallByStream(const std::shared_ptr<grpc::Channel>& channel,
                                               const FeedForwardCall& call, int64_t chunk_bytes) {
  return Stream<OfFeedForward>(channel, call, chunk_bytes);
}

}  // namespace layerd
