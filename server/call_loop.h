// Calls as gRPC brings them, whatever their method: bytes in, bytes out, on threads of ours.
//
// gRPC's callback API would do, but for its threads: it ends each call on another thread than it began on, and two of its
// threads take turns in waiting for the sockets, so that a small call wakes threads six times and costs twice the time of
// the CPUs. Here one thread at a time waits, and goes on to serve what has come; docs/design.md has the figures.
#ifndef LAYERD_SERVER_CALL_LOOP_H_
#define LAYERD_SERVER_CALL_LOOP_H_

#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

namespace layerd {

class CallLoop;
class ServerCall;

// What gRPC's queue gives back when something that was begun is done.
struct CallEvent {
  void (*run)(void* what, bool ok);
  void* what;
};

// A call that gRPC has brought, or is to bring.
struct CallArrival {
  explicit CallArrival(CallLoop& of);
  ~CallArrival();

  CallLoop& loop;
  grpc::GenericServerContext context;
  grpc::GenericServerAsyncReaderWriter stream{&context};
  ServerCall* call = nullptr;  // what became of it
  CallEvent arrived, ended;
};

// One call, with the methods of grpc::ServerBidiReactor and their rules: the On…() come one after the other for reads and
// for writes, but OnCancel() at any time after the constructor; at most one read and one write at a time; Finish() or
// StartWriteAndFinish() exactly once, and not before a write is done; and OnDone() when all of it is over. Threads: the
// Start…() from any.
class ServerCall {
 public:
  explicit ServerCall(std::unique_ptr<CallArrival> arrival);
  ServerCall(const ServerCall&) = delete;
  ServerCall& operator=(const ServerCall&) = delete;
  virtual ~ServerCall() = default;

 protected:
  virtual void OnReadDone(bool /*ok*/) {}
  virtual void OnWriteDone(bool /*ok*/) {}
  virtual void OnCancel() {}
  // The last: deletes the call.
  virtual void OnDone() = 0;

  grpc::GenericServerContext& context() { return arrival_->context; }
  // The error where a read has failed before there was a message.
  absl::Status NoMessage() const;
  // Whether the caller has gone away, as far as it is known; once a read has failed, whether it failed for that.
  bool IsCancelled() const { return cancelled_.load(); }

  void StartRead(grpc::ByteBuffer* bytes);  // which must live until OnReadDone()
  void StartWrite(const grpc::ByteBuffer& bytes);
  void StartWriteAndFinish(const grpc::ByteBuffer& bytes);
  void Finish(const absl::Status& status);  // with what it says of retries

 private:
  friend class CallLoop;
  friend struct CallArrival;
  template <void (ServerCall::*kMethod)(bool)>
  static void Run(void* call, bool ok) {
    (static_cast<ServerCall*>(call)->*kMethod)(ok);
  }

  // After the constructor.
  void Begun();
  void Read(bool ok);
  void Written(bool ok);
  void Finished(bool ok);
  void Ended();
  void Release();

  const std::unique_ptr<CallArrival> arrival_;
  CallEvent read_{&Run<&ServerCall::Read>, this};
  CallEvent written_{&Run<&ServerCall::Written>, this};
  CallEvent finished_{&Run<&ServerCall::Finished>, this};
  std::atomic<int> pending_{3};        // the constructor, the end of the call, Finish(), and what was started
  std::atomic<int> before_cancel_{2};  // the constructor, and the cancellation
  std::atomic<bool> cancelled_{false};
};

// Makes calls of what arrives. It has lanes: in each one thread at a time waits for events and runs them, one after the
// other, until one says BeforeLongWork() (lib/base/long_work.h): then the next thread takes its place. Threads: as said of
// each method.
class CallLoop {
 public:
  // Makes a ServerCall, which deletes itself.
  using Factory = std::function<ServerCall*(std::unique_ptr<CallArrival>)>;

  CallLoop();
  ~CallLoop();

  // These in this order, from one thread. `method`: "/layerd.v1.LayerService/Normalize"; others are UNIMPLEMENTED.
  void Serve(const std::string& method, Factory factory);
  void AddTo(grpc::ServerBuilder& builder);
  // Begins to serve, when the server has been built. RESOURCE_EXHAUSTED where a lane can have no thread.
  absl::Status Start();
  // After the server's Shutdown(); not where it was never built. Returns when all calls are done.
  void Stop();

 private:
  friend struct CallArrival;
  struct Lane;

  void Await(Lane& lane);
  void Arrive(std::unique_ptr<CallArrival> arrival, bool ok);
  static void Work(Lane& lane);
  static void StepAside();

  // The lane in which this thread waits for events, or runs one.
  static thread_local Lane* led_here_;

  grpc::AsyncGenericService service_;
  absl::flat_hash_map<std::string, Factory> factories_;
  std::atomic<int64_t> arrivals_ = 0;  // that there are: calls that are awaited, and those under way
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace layerd

#endif  // LAYERD_SERVER_CALL_LOOP_H_
