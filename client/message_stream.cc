#include "client/message_stream.h"

#include <utility>

#include "wire/status_codec.h"

namespace layerd {

MessageStream::MessageStream(std::shared_ptr<grpc::Channel> channel, const std::string& method, absl::Time deadline)
    : channel_(std::move(channel)), stub_(channel_) {
  if (deadline != absl::InfiniteFuture()) context_.set_deadline(absl::ToChronoTime(deadline));
  stub_.PrepareBidiStreamingCall(&context_, method, grpc::StubOptions(), this);
  AddHold();
  StartCall();
}

MessageStream::~MessageStream() {
  Cancel();
  static_cast<void>(Finish());
}

// gRPC may call back on the thread that begins an operation, so it is begun without the mutex.
bool MessageStream::Write(const grpc::ByteBuffer& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!WaitToWrite(lock)) return false;
  outgoing_ = message;
  lock.unlock();
  StartWrite(&outgoing_);
  return true;
}

void MessageStream::WritesDone() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!WaitToWrite(lock)) return;
  closed_ = true;
  lock.unlock();
  StartWritesDone();
}

bool MessageStream::WaitToWrite(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [this] { return !writing_; });
  if (closed_) return false;
  writing_ = true;
  return true;
}

bool MessageStream::Read(grpc::ByteBuffer& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!held_) return false;
  reading_ = true;
  lock.unlock();
  StartRead(&incoming_);
  lock.lock();
  changed_.wait(lock, [this] { return !reading_; });
  if (!read_) return false;
  message.Swap(&incoming_);
  incoming_.Clear();
  return true;
}

absl::Status MessageStream::Finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.wait(lock, [this] { return !writing_; });  // a thread that has taken its turn has begun its write
  if (held_) {
    held_ = false;
    lock.unlock();
    RemoveHold();
    lock.lock();
  }
  changed_.wait(lock, [this] { return done_; });
  return wire::DecodeStatus(status_);
}

void MessageStream::OnWriteDone(bool ok) {
  std::lock_guard<std::mutex> lock(mutex_);
  writing_ = false;
  closed_ = closed_ || !ok;
  outgoing_.Clear();
  changed_.notify_all();
}

void MessageStream::OnWritesDoneDone(bool /*ok*/) {
  std::lock_guard<std::mutex> lock(mutex_);
  writing_ = false;
  changed_.notify_all();
}

void MessageStream::OnReadDone(bool ok) {
  std::lock_guard<std::mutex> lock(mutex_);
  reading_ = false;
  read_ = ok;
  changed_.notify_all();
}

void MessageStream::OnDone(const grpc::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  status_ = status;
  changed_.notify_all();
}

}  // namespace layerd
