#include "server/call_loop.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lib/base/long_work.h"

namespace layerd {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

struct Seen {
  std::atomic<int> begun = 0, done = 0;
  std::atomic<int> cancelled = 0, read = 0;
};

// Sends back what it gets.
class Echo final : public ServerCall {
 public:
  Echo(std::unique_ptr<CallArrival> arrival, Seen& seen) : ServerCall(std::move(arrival)), seen_(seen) {
    StartRead(&bytes_);
  }
  void OnReadDone(bool ok) override {
    ok ? StartWriteAndFinish(bytes_) : Finish(absl::InvalidArgumentError("nothing"));
  }
  void OnDone() override {
    ++seen_.done;
    delete this;
  }

 private:
  Seen& seen_;
  grpc::ByteBuffer bytes_;
};

// Keeps its thread until it is told.
class Busy final : public ServerCall {
 public:
  Busy(std::unique_ptr<CallArrival> arrival, Seen& seen, absl::Notification& told)
      : ServerCall(std::move(arrival)), seen_(seen), told_(told) {
    StartRead(&bytes_);
  }
  void OnReadDone(bool /*ok*/) override {
    BeforeLongWork();
    ++seen_.read;
    const bool in_time = told_.WaitForNotificationWithTimeout(kLong);
    Finish(in_time ? absl::OkStatus() : absl::DeadlineExceededError("nobody told it"));
  }
  void OnDone() override { delete this; }

 private:
  Seen& seen_;
  absl::Notification& told_;
  grpc::ByteBuffer bytes_;
};

// Reads until its caller has gone away.
class Reader final : public ServerCall {
 public:
  Reader(std::unique_ptr<CallArrival> arrival, Seen& seen) : ServerCall(std::move(arrival)), seen_(seen) {
    ++seen_.begun;
    StartRead(&bytes_);
  }
  void OnReadDone(bool ok) override {
    if (ok) {
      ++seen_.read;
      return StartRead(&bytes_);
    }
    EXPECT_TRUE(IsCancelled());
    Finish(absl::CancelledError("gone"));
  }
  void OnCancel() override {
    EXPECT_TRUE(IsCancelled());
    ++seen_.cancelled;
  }
  void OnDone() override {
    ++seen_.done;
    delete this;
  }

 private:
  Seen& seen_;
  grpc::ByteBuffer bytes_;
};

class CallLoopTest : public ::testing::Test {
 protected:
  CallLoopTest() {
    loop_.Serve("/test/Echo", [this](auto arrival) { return new Echo(std::move(arrival), echoes_); });
    loop_.Serve("/test/Busy", [this](auto arrival) { return new Busy(std::move(arrival), busy_, told_); });
    loop_.Serve("/test/Read", [this](auto arrival) { return new Reader(std::move(arrival), reader_); });
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    loop_.AddTo(builder);
    server_ = builder.BuildAndStart();
    EXPECT_TRUE(loop_.Start().ok());
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
  }
  ~CallLoopTest() override { Stop(); }

  void Stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    loop_.Stop();
    server_ = nullptr;
  }

  struct Answer {
    grpc::Status status;
    std::string text;
  };
  Answer Call(const std::string& method, const std::string& text) {
    grpc::ClientContext context;
    grpc::GenericStub stub(channel_);
    const grpc::Slice slice(text);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer answer;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, method, grpc::StubOptions(), &request, &answer,
                   [&done](const grpc::Status& status) { done.set_value(status); });
    Answer got = {done.get_future().get(), ""};
    grpc::Slice back;
    if (got.status.ok() && answer.Valid() && answer.DumpToSingleSlice(&back).ok()) {
      got.text.assign(reinterpret_cast<const char*>(back.begin()), back.size());
    }
    return got;
  }
  static bool Comes(const std::atomic<int>& count, int wanted) {
    const absl::Time end = absl::Now() + kLong;
    while (count < wanted && absl::Now() < end) absl::SleepFor(absl::Milliseconds(1));
    return count == wanted;
  }

  Seen echoes_, busy_, reader_;
  absl::Notification told_;
  CallLoop loop_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(CallLoopTest, ServesTheMethodsThatItHasAndRefusesOthers) {
  EXPECT_EQ(Call("/test/Echo", "hello").text, "hello");
  const Answer unknown = Call("/test/Nothing", "hello");
  EXPECT_EQ(unknown.status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(unknown.status.error_message(), "no such method: /test/Nothing");
}

TEST_F(CallLoopTest, EachOfManyCallsAtOnceGetsItsAnswerAndEnds) {
  constexpr int kCallers = 32, kCalls = 50;
  std::vector<std::thread> callers;
  callers.reserve(kCallers);
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([this, i] {
      for (int n = 0; n < kCalls; ++n) {
        const std::string text = absl::StrCat(i, " ", n);
        EXPECT_EQ(Call("/test/Echo", text).text, text);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(Comes(echoes_.done, kCallers * kCalls));
}

TEST_F(CallLoopTest, ACallThatIsLongKeepsNoOtherWaiting) {
  std::future<Answer> busy = std::async(std::launch::async, [this] { return Call("/test/Busy", ""); });
  EXPECT_TRUE(Comes(busy_.read, 1));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Call("/test/Echo", "hello").text, "hello");
  told_.Notify();
  EXPECT_TRUE(busy.get().status.ok());
}

TEST_F(CallLoopTest, ACallerWhoGoesAwayIsNoticed) {
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  grpc::GenericStub stub(channel_);
  auto stream = stub.PrepareCall(&context, "/test/Read", &queue);
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
  };
  stream->StartCall(nullptr);
  wait();
  const grpc::Slice slice("hello");
  stream->Write(grpc::ByteBuffer(&slice, 1), nullptr);
  wait();
  EXPECT_TRUE(Comes(reader_.read, 1));
  context.TryCancel();
  EXPECT_TRUE(Comes(reader_.cancelled, 1));
  EXPECT_TRUE(Comes(reader_.done, 1));
  grpc::Status status;
  stream->Finish(&status, nullptr);
  wait();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(CallLoopTest, StopsWithCallsThatAreStillOpen) {
  constexpr int kOpen = 200;
  struct Open {
    explicit Open(grpc::GenericStub& stub, grpc::CompletionQueue& queue)
        : stream(stub.PrepareCall(&context, "/test/Read", &queue)) {
      stream->StartCall(nullptr);
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    grpc::Status status;
  };
  grpc::CompletionQueue queue;
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
  };
  grpc::GenericStub stub(channel_);
  std::vector<std::unique_ptr<Open>> calls;
  calls.reserve(kOpen);
  for (int i = 0; i < kOpen; ++i) calls.push_back(std::make_unique<Open>(stub, queue));
  for (int i = 0; i < kOpen; ++i) wait();
  EXPECT_TRUE(Comes(reader_.begun, kOpen));
  Stop();
  EXPECT_EQ(reader_.done, kOpen);
  for (const auto& call : calls) {
    call->stream->Finish(&call->status, nullptr);
    wait();
    EXPECT_FALSE(call->status.ok());
  }
}

}  // namespace
}  // namespace layerd
