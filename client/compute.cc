// layerctl normalize, feedforward and health.
#include <cstdio>
#include <utility>

#include "client/commands.h"
#include "client/output.h"
#include "client/tensor_source.h"
#include "lib/base/errors.h"

namespace layerd {
namespace {

void AddIfThere(NamedTensors& tensors, const char* name, const std::optional<Tensor>& tensor) {
  if (tensor) tensors.emplace_back(name, *tensor);
}

// Before anything is asked, rather than after it was answered.
absl::Status CheckOut(const Session& session) {
  return session.out.empty() ? absl::OkStatus() : Under("--out", CheckWritable(session.out));
}

int Present(const Session& session, const NamedTensors& tensors, const std::optional<ErrorReport>& report) {
  if (!session.out.empty()) {
    if (auto status = WriteTensor(session.out, tensors.front().second); !status.ok()) return FailLocally(status);
  }
  if (session.json) {
    std::fputs(ToJson(tensors, report).c_str(), stdout);
  } else if (session.out.empty() || report) {
    std::fputs(ToTable(session.out.empty() ? tensors : NamedTensors(), report).c_str(), stdout);
  }
  return report && !report->within_contract ? kExitOutsideContract : kExitOk;
}

}  // namespace

int RunNormalize(const Session& session, const NormalizeOptions& options) {
  if (auto status = CheckOut(session); !status.ok()) return FailLocally(status);
  auto call = options.Build();
  if (!call.ok()) return FailLocally(call.status());
  RemoteEngine engine(session.EngineOptions());
  call->context.deadline = session.Deadline();
  const auto result = Normalize(engine, *std::move(call));
  if (!result.ok()) return FailRemotely(result.status());
  NamedTensors tensors = {{"output", result->outputs.output}};
  AddIfThere(tensors, "residual_sum", result->outputs.residual_sum);
  AddIfThere(tensors, "inverse_rms", result->outputs.inverse_rms);
  AddIfThere(tensors, "mean", result->outputs.mean);
  return Present(session, tensors, result->report);
}

int RunFeedForward(const Session& session, const FeedForwardOptions& options) {
  if (auto status = CheckOut(session); !status.ok()) return FailLocally(status);
  auto call = options.Build();
  if (!call.ok()) return FailLocally(call.status());
  RemoteEngine engine(session.EngineOptions());
  call->context.deadline = session.Deadline();
  const auto result = FeedForward(engine, *std::move(call));
  if (!result.ok()) return FailRemotely(result.status());
  NamedTensors tensors = {{"output", result->outputs.output}};
  AddIfThere(tensors, "gate", result->outputs.gate);
  AddIfThere(tensors, "up", result->outputs.up);
  AddIfThere(tensors, "hidden", result->outputs.hidden);
  AddIfThere(tensors, "normed", result->outputs.normed);
  return Present(session, tensors, result->report);
}

int RunHealth(const Session& session, const std::string& service) {
  RemoteEngine engine(session.EngineOptions());
  if (auto status = engine.CheckHealth(service, absl::Seconds(session.timeout_s)); !status.ok()) {
    return FailRemotely(status);
  }
  std::puts(session.json ? "{\"status\": \"SERVING\"}" : "SERVING");
  return kExitOk;
}

}  // namespace layerd
