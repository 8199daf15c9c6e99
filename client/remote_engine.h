// A layer engine on another machine: calls go over gRPC to a layerd.
#ifndef LAYERD_CLIENT_REMOTE_ENGINE_H_
#define LAYERD_CLIENT_REMOTE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/row_stream.h"
#include "client/shared_memory.h"
#include "lib/engine/layer_engine.h"

namespace layerd {

// The reason of the INTERNAL error for an answer that is damaged, or does not fit its call.
inline constexpr char kMalformedAnswer[] = "MALFORMED_ANSWER";
absl::Status MalformedAnswer(std::string_view what);

struct RemoteEngineOptions {
  std::string target = "127.0.0.1:50051";  // HOST:PORT, or unix:PATH
  // Largest answer that is taken; gRPC's own default of 4 MiB is too small for tensors.
  int64_t max_answer_bytes = int64_t{2047} << 20;
  // A call with so many bytes of rows (input, residual, gate) or more is sent as a stream, in messages of about
  // stream_chunk_bytes, 4 MiB at most.
  int64_t stream_from_bytes = int64_t{16} << 20;
  int64_t stream_chunk_bytes = int64_t{1} << 20;
  // Tensors that lie in it at a multiple of 64 bytes are not sent, nor is an output whose place lies in it: the server
  // reads and writes them there. After an error the server may still be at it for a while.
  std::vector<std::shared_ptr<const SharedMemory>> shared_memory;
};

// The call's tensors are sent from where they are; the answer's stay where gRPC put them (scattered, see Tensor). A
// call with many rows goes as a stream of them, whatever the server's --max_message_mib is, and its answer, the same to
// the bit, is put together in memory of its own. So does a call that the server finds too large for a message, where
// rows make it so. Errors of the server come back as it made them, with details; UNAVAILABLE without a reason
// (lib/base/errors.h) means that it could not be reached.
//
// The connection is made by the first call, and again after it broke; no proxy is used. A deadline is the call's own:
// left infinite, a call waits for as long as the server takes. Cancellation is looked at before a call is sent, and
// between the messages of a stream. Where a call has output_memory that is not shared with the server, the answer is copied
// there.
//
// Threads: any. The destructor waits for the calls under way.
class RemoteEngine : public LayerEngine {
 public:
  explicit RemoteEngine(const RemoteEngineOptions& options);
  ~RemoteEngine() override;

  void Normalize(NormalizeCall call, NormalizeDone done) override;
  void FeedForward(FeedForwardCall call, FeedForwardDone done) override;

  // Begins a stream on the same connection, for more rows than fit into memory: client/row_stream.h. It may outlive the
  // engine.
  std::unique_ptr<NormalizeStream> StreamNormalize(const NormalizeCall& call);
  std::unique_ptr<FeedForwardStream> StreamFeedForward(const FeedForwardCall& call);

  // Asks the server's health service. OK when it is serving; UNAVAILABLE, with reason NOT_SERVING, when it says that it
  // is not; NOT_FOUND for a service it does not know. `service` empty: the whole server.
  absl::Status CheckHealth(const std::string& service, absl::Duration timeout);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace layerd

#endif  // LAYERD_CLIENT_REMOTE_ENGINE_H_
