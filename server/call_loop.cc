#include "server/call_loop.h"

#include <grpc/grpc.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "lib/base/long_work.h"
#include "lib/base/parallel.h"
#include "wire/status_codec.h"

namespace layerd {
namespace {

// Calls that gRPC may bring to a lane before it is asked for more.
constexpr int kAwaited = 16;
// One thread that waits can serve about so many CPUs.
constexpr int kCpusPerLane = 4;

class Unimplemented final : public ServerCall {
 public:
  explicit Unimplemented(std::unique_ptr<CallArrival> arrival) : ServerCall(std::move(arrival)) {
    Finish(absl::UnimplementedError(absl::StrCat("no such method: ", Shortened(context().method()))));
  }
  void OnDone() override { delete this; }
};

}  // namespace

CallArrival::CallArrival(CallLoop& of)
    : loop(of),
      arrived{[](void* what, bool ok) {
                auto* arrival = static_cast<CallArrival*>(what);
                arrival->loop.Arrive(std::unique_ptr<CallArrival>(arrival), ok);
              },
              this},
      ended{[](void* what, bool /*ok*/) { static_cast<CallArrival*>(what)->call->Ended(); }, this} {
  loop.arrivals_.fetch_add(1);
}

CallArrival::~CallArrival() {
  if (loop.arrivals_.fetch_sub(1) == 1) loop.arrivals_.notify_all();
}

ServerCall::ServerCall(std::unique_ptr<CallArrival> arrival) : arrival_(std::move(arrival)) { arrival_->call = this; }

absl::Status ServerCall::NoMessage() const {
  if (IsCancelled()) return CancelledWhileWaiting();
  return InvalidField("", "MALFORMED_MESSAGE", "expected a message, got none, or only the beginning of one");
}

void ServerCall::StartRead(grpc::ByteBuffer* bytes) {
  pending_.fetch_add(1, std::memory_order_relaxed);
  arrival_->stream.Read(bytes, &read_);
}

void ServerCall::StartWrite(const grpc::ByteBuffer& bytes) {
  pending_.fetch_add(1, std::memory_order_relaxed);
  arrival_->stream.Write(bytes, &written_);
}

void ServerCall::StartWriteAndFinish(const grpc::ByteBuffer& bytes) {
  arrival_->stream.WriteAndFinish(bytes, grpc::WriteOptions(), grpc::Status::OK, &finished_);
}

void ServerCall::Finish(const absl::Status& status) {
  if (const auto pushback = wire::PushbackOf(status)) {
    context().AddTrailingMetadata(wire::kPushbackTrailer, *pushback);
  }
  arrival_->stream.Finish(wire::EncodeStatus(status), &finished_);
}

void ServerCall::Begun() {
  if (before_cancel_.fetch_sub(1) == 1) OnCancel();
  Release();
}

void ServerCall::Read(bool ok) {
  if (!ok && grpc_call_failed_before_recv_message(arrival_->context.c_call()) != 0) cancelled_ = true;
  OnReadDone(ok);
  Release();
}

void ServerCall::Written(bool ok) {
  OnWriteDone(ok);
  Release();
}

void ServerCall::Finished(bool /*ok*/) { Release(); }

void ServerCall::Ended() {
  if (arrival_->context.IsCancelled()) {
    cancelled_ = true;
    if (before_cancel_.fetch_sub(1) == 1) OnCancel();
  }
  Release();
}

void ServerCall::Release() {
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) OnDone();
}

struct CallLoop::Lane {
  std::unique_ptr<grpc::ServerCompletionQueue> queue;
  std::mutex mutex;
  std::condition_variable free;
  bool led = false;    // guarded by mutex; a thread waits for events, or runs one
  bool ended = false;  // guarded by mutex; there will be none
  std::vector<std::thread> threads;
};

thread_local CallLoop::Lane* CallLoop::led_here_ = nullptr;

CallLoop::CallLoop() = default;
CallLoop::~CallLoop() = default;

void CallLoop::Serve(const std::string& method, Factory factory) { factories_[method] = std::move(factory); }

void CallLoop::AddTo(grpc::ServerBuilder& builder) {
  builder.RegisterAsyncGenericService(&service_);
  for (int cpus = AvailableCpus(); cpus > 0; cpus -= kCpusPerLane) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->queue = builder.AddCompletionQueue();
  }
}

absl::Status CallLoop::Start() {
  const int threads = 1 + std::min(kCpusPerLane, AvailableCpus());
  for (const auto& lane : lanes_) {
    try {
      for (int i = 0; i < threads; ++i) lane->threads.emplace_back([&lane = *lane] { Work(lane); });
    } catch (const std::system_error&) {  // a limit on processes: those that did start will do
      if (lane->threads.empty()) return absl::ResourceExhaustedError("no thread to serve calls can be started");
    }
    for (int i = 0; i < kAwaited; ++i) Await(*lane);
  }
  return absl::OkStatus();
}

void CallLoop::Stop() {
  // A call that the server has cancelled is still to be finished, by the queue, which takes nothing once it ends.
  for (int64_t left = arrivals_; left > 0; left = arrivals_) arrivals_.wait(left);
  for (const auto& lane : lanes_) {
    lane->queue->Shutdown();
    if (lane->threads.empty()) Work(*lane);
    for (std::thread& thread : lane->threads) thread.join();
  }
  lanes_.clear();
}

void CallLoop::Await(Lane& lane) {
  auto* arrival = new CallArrival(*this);
  arrival->context.AsyncNotifyWhenDone(&arrival->ended);
  service_.RequestCall(&arrival->context, &arrival->stream, lane.queue.get(), lane.queue.get(), &arrival->arrived);
}

// Not ok: the server has ended.
void CallLoop::Arrive(std::unique_ptr<CallArrival> arrival, bool ok) {
  if (!ok) return;
  Await(*led_here_);
  const auto factory = factories_.find(arrival->context.method());
  ServerCall* const call =
      factory == factories_.end() ? new Unimplemented(std::move(arrival)) : factory->second(std::move(arrival));
  call->Begun();
}

void CallLoop::Work(Lane& lane) {
  on_long_work = &StepAside;
  std::unique_lock<std::mutex> lock(lane.mutex);
  for (;;) {
    lane.free.wait(lock, [&lane] { return !lane.led; });
    if (lane.ended) return;
    lane.led = true;
    lock.unlock();
    led_here_ = &lane;
    void* event = nullptr;
    bool ok = false;
    bool more = true;
    while (led_here_ != nullptr && (more = lane.queue->Next(&event, &ok))) {
      const auto& [run, what] = *static_cast<CallEvent*>(event);
      run(what, ok);
    }
    if (!more) StepAside();
    lock.lock();
    lane.ended = lane.ended || !more;
    if (lane.ended) lane.free.notify_all();
  }
}

void CallLoop::StepAside() {
  Lane* const lane = std::exchange(led_here_, nullptr);
  if (lane == nullptr) return;
  std::lock_guard<std::mutex> lock(lane->mutex);
  lane->led = false;
  lane->free.notify_one();
}

}  // namespace layerd
