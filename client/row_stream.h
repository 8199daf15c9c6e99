// A call with more rows than fit into memory, or into a message: its rows go out some at a time, and their answers come
// back in order meanwhile (StreamNormalize and StreamFeedForward of proto/layerd/v1/layer_service.proto).
//
//   auto stream = engine.StreamNormalize(call);  // the layer, and the first rows or none ([0, d])
//   …
//   if (!stream->Write({.input = rows})) …                  // false: it is over, and Read() tells why
//   const auto answer = stream->Read();                     // the first answers are those of the call's own rows
//   …
//   stream->WritesDone();
//   const absl::Status status = stream->Finish();
//
// The server takes three messages that it has not answered, and then waits for its answers to be read. So write on one
// thread and read on another; or on one thread have at most kMostUnanswered messages that are not answered: such a
// writer never waits for itself.
#ifndef LAYERD_CLIENT_ROW_STREAM_H_
#define LAYERD_CLIENT_ROW_STREAM_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lib/engine/layer_engine.h"

namespace grpc {
class ByteBuffer;
class Channel;
}  // namespace grpc

namespace layerd {

class MessageStream;

// Most bytes of rows in a message, and most messages that the server takes without having answered them.
inline constexpr int64_t kMostRowBytes = int64_t{4} << 20;
inline constexpr int kMostUnanswered = 3;

struct NormalizeChunk {
  Tensor input;
  std::optional<Tensor> residual = std::nullopt;  // where the call has one
  std::optional<Tensor> gate = std::nullopt;      // where the call has one
};
struct FeedForwardChunk {
  Tensor input;
};

struct NormalizeStreamKind {
  using Call = NormalizeCall;
  using Rows = NormalizeChunk;
  using Result = NormalizeResult;
};
struct FeedForwardStreamKind {
  using Call = FeedForwardCall;
  using Rows = FeedForwardChunk;
  using Result = FeedForwardResult;
};

// Tensors are sent from where they are, and answers stay where gRPC put them (scattered, see Tensor). Memory: one
// message that is being sent, and one that is being read; what gRPC holds besides is bounded by its flow control.
//
// Threads: one may write (Write, WritesDone) and one read (Read, Finish) at a time, two or the same; Cancel from any.
// The destructor cancels what is left and waits until gRPC is done with it: nobody may be in a method then.
template <typename Kind>
class RowStream {
 public:
  using Call = typename Kind::Call;
  using Rows = typename Kind::Rows;
  using Result = typename Kind::Result;

  // For RemoteEngine. The call's deadline is that of the stream; its cancellation is not looked at.
  RowStream(std::shared_ptr<grpc::Channel> channel, const Call& first);
  ~RowStream();
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  // Sends some more rows, as soon as those before them are on their way: waits for as long as the server does not take
  // them. False where the stream is over, or WritesDone() was called; Read() and Finish() tell why.
  bool Write(const Rows& rows);
  // There are no more rows. Waits as Write() does.
  void WritesDone();

  // Waits for the answer to the next message: of the call itself, then of each Write(). Nothing where all are answered
  // after WritesDone(). Errors: the server's, with details, which end the stream; as of calls those of the connection;
  // INTERNAL, reason MALFORMED_ANSWER, for an answer that does not fit its rows, or was not asked for, or is missing.
  // An error is told again by every later Read().
  absl::StatusOr<std::optional<Result>> Read();
  // No more rows; reads what answers are left and gives them up; how the stream ended.
  absl::Status Finish();

  // Ends the stream and every wait for it: with CANCELLED.
  void Cancel();

 private:
  // What an answer must be like.
  struct Asked {
    DType dtype;
    Shape shape;
  };

  // Encodes by `encode` and sends; the answer is to fit `input`.
  template <typename Encode>
  bool Send(const Tensor& input, Encode encode);
  absl::StatusOr<Result> Take(grpc::ByteBuffer& bytes);
  // Ends the stream for a fault that this side has found; an earlier one is kept.
  void Fail(absl::Status status);
  absl::Status End();

  const std::optional<DType> output_dtype_;
  const std::unique_ptr<MessageStream> stream_;
  std::optional<absl::Status> end_;  // of the thread that reads

  std::mutex mutex_;
  std::deque<Asked> asked_;  // guarded by mutex_: messages that are not answered
  bool all_sent_ = false;    // guarded by mutex_
  absl::Status failure_;     // guarded by mutex_
};

using NormalizeStream = RowStream<NormalizeStreamKind>;
using FeedForwardStream = RowStream<FeedForwardStreamKind>;

extern template class RowStream<NormalizeStreamKind>;
extern template class RowStream<FeedForwardStreamKind>;

}  // namespace layerd

#endif  // LAYERD_CLIENT_ROW_STREAM_H_
