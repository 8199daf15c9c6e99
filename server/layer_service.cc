#include "server/layer_service.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "lib/base/errors.h"
#include "server/unary_call.h"

namespace layerd {
namespace {

class Unimplemented final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Unimplemented(const std::string& method) {
    Finish(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, absl::StrCat("no such method: ", Shortened(method))));
  }
  void OnDone() override { delete this; }
};

}  // namespace

RowStreamReactor* LayerService::StreamNormalize(grpc::CallbackServerContext* context) {
  return StartNormalizeStream(engine_, admission_, options_.max_message_bytes, context);
}

RowStreamReactor* LayerService::StreamFeedForward(grpc::CallbackServerContext* context) {
  return StartFeedForwardStream(engine_, admission_, options_.max_message_bytes, context);
}

LayerCallService::LayerCallService(LayerEngine& engine, Admission& admission, const SharedRegions* regions,
                                   const LayerServiceOptions& options)
    : engine_(engine),
      admission_(admission),
      regions_(regions),
      options_(options),
      decoders_(options.decoding_threads, options.queue_calls, "--queue_calls") {}

grpc::ServerGenericBidiReactor* LayerCallService::CreateReactor(grpc::GenericCallbackServerContext* context) {
  const UnaryCallContext service = {engine_, admission_, decoders_, regions_, options_.max_message_bytes};
  if (context->method() == "/layerd.v1.LayerService/Normalize") return StartNormalizeCall(service, context);
  if (context->method() == "/layerd.v1.LayerService/FeedForward") return StartFeedForwardCall(service, context);
  return new Unimplemented(context->method());
}

}  // namespace layerd
