// One bidirectional stream of messages as bytes, for callers who wait.
#ifndef LAYERD_CLIENT_MESSAGE_STREAM_H_
#define LAYERD_CLIENT_MESSAGE_STREAM_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace layerd {

// Holds one message that is being sent and one that is being received; the rest is gRPC's flow control.
//
// Threads: one may write (Write, WritesDone) and one read (Read, Finish) at a time, two or the same; Cancel from any.
// The destructor cancels what is left of the stream and waits for its end: no other call may be under way.
class MessageStream final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // `deadline` is that of the whole stream.
  MessageStream(std::shared_ptr<grpc::Channel> channel, const std::string& method, absl::Time deadline);
  ~MessageStream() override;

  // Sends `message`, whose bytes it shares, as soon as the one before it is on its way: waits for as long as the server
  // does not take it. False where the stream is over, or WritesDone() was called; why is for Finish() to tell.
  bool Write(const grpc::ByteBuffer& message);
  // There will be no more messages. Waits as Write() does.
  void WritesDone();

  // Waits for the next message; false where there is none any more.
  bool Read(grpc::ByteBuffer& message);
  // Waits for the end, which comes once Read() has answered false or the stream was cancelled. The server's status,
  // with its details.
  absl::Status Finish();

  // Ends the stream, and every wait for it.
  void Cancel() { context_.TryCancel(); }

 private:
  void OnWriteDone(bool ok) override;
  void OnWritesDoneDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  // With mutex_ held. Whether something may be sent, once what is being sent is gone.
  bool WaitToWrite(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_;  // gRPC's while writing_
  grpc::ByteBuffer incoming_;  // gRPC's while reading_

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_, from here on.
  bool writing_ = false;
  bool reading_ = false;
  bool read_ = false;    // the last read has got a message
  bool closed_ = false;  // nothing may be sent any more
  bool held_ = true;     // gRPC keeps the stream open for what may yet be begun
  bool done_ = false;
  grpc::Status status_;
};

}  // namespace layerd

#endif  // LAYERD_CLIENT_MESSAGE_STREAM_H_
