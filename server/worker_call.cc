#include "server/worker_call.h"

namespace layerd {
namespace {

class WorkerCall final : public ServerCall {
 public:
  WorkerCall(std::unique_ptr<CallArrival> arrival, CallGate& gate, WorkerPool& pool, ServeBytes serve)
      : ServerCall(std::move(arrival)), gate_(gate), pool_(pool), serve_(std::move(serve)), entered_(gate.Enter()) {
    entered_.ok() ? StartRead(&request_) : Finish(entered_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(NoMessage());
    const auto status = pool_.Submit([this] {
      grpc::ByteBuffer answer;
      const absl::Status served = serve_(request_, answer);
      served.ok() ? StartWriteAndFinish(answer) : Finish(served);
    });
    if (!status.ok()) Finish(status);
  }

  void OnDone() override {
    if (entered_.ok()) gate_.Leave();
    delete this;
  }

 private:
  CallGate& gate_;
  WorkerPool& pool_;
  const ServeBytes serve_;
  const absl::Status entered_;
  grpc::ByteBuffer request_;
};

}  // namespace

ServerCall* NewWorkerCall(std::unique_ptr<CallArrival> arrival, CallGate& gate, WorkerPool& pool, ServeBytes serve) {
  return new WorkerCall(std::move(arrival), gate, pool, std::move(serve));
}

}  // namespace layerd
